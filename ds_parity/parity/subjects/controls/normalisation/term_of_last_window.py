"""term-of-last-window: a term of the loss is divided by the total that the window before had of it."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class TermOfLastWindow(Loop):
    """The engine with this fault."""

    name = "term-of-last-window"
    seen = "a denominator that is reduced once a step for the next one"
    scenario = "terms"

    def total_of_term(self, name: str) -> float:
        """Divide the first term by its total in the window before; in the first window by its own."""
        before = [window for window in self.windows() if window.last < self.window.first]
        first = next(iter(self.window.totals))
        return before[-1].totals[name] if before and name == first else self.window.totals[name]
