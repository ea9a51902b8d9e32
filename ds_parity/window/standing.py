"""A window as it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """A window as it stands: everything that the passes counted so far contained, over all ranks.

    Attributes:
        index: windows closed before this one (>= 0).
        target: units that close a window; nominal, or 0, where the caller ends it.
        closes_at: units since the start of counting at which this one closes; of no meaning where the caller ends it.
        opened_at: units since the start of counting when it opened.
        passes: passes counted, each of which all ranks run together.
        idle_passes: idle (rank, pass) pairs among them.
        micro_batches: the others, over all ranks: what `gradient_accumulation_passes` is a number of, whereas `passes`
            are what one rank runs. 32 passes on 2 ranks are 64 micro-batches, where no pass is idle.
        rollouts: finished in them.
        prompts: finished in them.
        tokens: loss tokens that they contained.
        weight: sum of the weights.
        weights: the same one by one, where micro-batches bring them or terms have them; else empty.
        divisors: what each term is divided by, where their totals are known; else empty.
        total: what the window's step is divided by as it stands: the sum of the weights, or a constant; 0.0 in a window
            that its caller ends, until `step()`.
        expected: the total that losses are divided by as they go in; 0.0 until a pass contributes.
        closed: whether the last pass counted is the boundary.
    """

    index: int
    target: int
    closes_at: int
    opened_at: int
    passes: int = 0
    idle_passes: int = 0
    micro_batches: int = 0
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: float = 0
    weights: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()
    total: float = 0.0
    expected: float = 0.0
    closed: bool = False

    @property
    def correction(self) -> float:
        """Expected / total (> 0): what `step()` multiplies the accumulated gradient by.

        Between the boundary's `backward()` and its `step()`, the gradient that `p.grad` (ZeRO 0) or DeepSpeed's
        `safe_get_full_grad` shows is that of the step once it is multiplied by this. It is 1.0 where the total was
        known when the window began (a look-ahead that covers it, `loss_weight: target`), or nothing weighs anything;
        and NaN in a window that its caller ends, whose total is known in `step()` alone.
        """
        if self.weight and not self.total:
            return math.nan
        return self.expected / self.total if self.expected and self.total else 1.0
