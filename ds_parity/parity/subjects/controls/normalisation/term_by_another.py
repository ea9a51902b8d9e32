"""term-by-another: a term of the loss is divided by the total of another term, a mean over rollouts by tokens."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class TermByAnother(Loop):
    """The engine with this fault."""

    name = "term-by-another"
    seen = "one denominator for the policy's loss per token and a KL penalty per rollout, SkyRL"
    scenario = "terms"

    def total_of_term(self, name: str) -> float:
        """Divide the second term by the first one's total."""
        first, second, *_ = self.window.totals
        return self.window.totals[first if name == second else name]
