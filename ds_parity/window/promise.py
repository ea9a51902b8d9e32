"""What a window will contain, said before its first pass, and held against it at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ds_parity.errors import WindowError
from ds_parity.window.counts import WindowTotals
from ds_parity.window.standing import Window


@dataclass(frozen=True, slots=True)
class Promise:
    """What a window will contain, as all ranks have said before its first pass.

    Attributes:
        totals: over all ranks; what nobody has said is 0.
        said: names of what every rank has said, of `rollouts`, `prompts`, `tokens`, `active` and `weights`.
    """

    totals: WindowTotals
    said: frozenset[str]

    def refuse_other(self, window: Window) -> None:
        """Raise WindowError where a closed window contains something else."""
        holds = {
            "rollouts": window.rollouts,
            "prompts": window.prompts,
            "tokens": window.tokens,
            "active": window.micro_batches,
            "weights": window.weights,
        }
        said = {name: getattr(self.totals, name) for name in self.said}
        wrong = {name: holds[name] for name in sorted(said) if not _equal(holds[name], said[name])}
        if len(wrong) > 1:  # weights follow from the others
            wrong.pop("weights", None)
        if wrong:
            found = ", ".join(f"{value} {_SAID.get(name, name)}" for name, value in wrong.items())
            expected = ", ".join(f"{said[name]} {_SAID.get(name, name)}" for name in wrong)
            raise WindowError(
                f"window {window.index} contains {found} over all ranks, and expect() has said {expected}: its losses "
                "were divided by that, so that the step would be wrong, and none is taken. Say what the window's "
                "micro-batches contain, on every rank, or leave expect() out where all losses have one unit; to go on "
                "from here, load a checkpoint"
            )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, tuple):
        return bool(one == other)
    # Weights may be fractions, whose sums depend on their order, and were often summed in fp32 by who says them: a few
    # roundings of 6e-8 each. An empty tuple stands for zeros.
    length = max(len(one), len(other))
    pairs = zip(one or (0.0,) * length, other or (0.0,) * length, strict=True)
    return all(math.isclose(own, told, rel_tol=1e-6) for own, told in pairs)


_SAID = {"active": "micro-batches"}
