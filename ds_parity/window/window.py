"""The window: which pass closes it, and what the step's loss is divided by. A state machine to test on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_parity.errors import WindowError
from ds_parity.window.counts import PassTotals
from ds_parity.window.progress import Progress
from ds_parity.window.weighting import Weighting


@dataclass(frozen=True, slots=True)
class Rules:
    """What closes a window and what a loss is weighed by; the words are those of the configuration.

    Attributes:
        target: units over all data-parallel ranks that close a window (>= 1).
        ranks: data-parallel ranks (>= 1).
        count: `rollout` or `prompt`, the unit of the target.
        overshoot: `carry`, `reset` or `error`, what a surplus does.
        loss_weight: `rollout`, `token`, `pass` or `target`, what a loss is weighed by unless the `Ledger` is given a
            weighting of its own; what is in force is `Ledger.weighting`.
    """

    target: int
    ranks: int
    count: str = "rollout"
    overshoot: str = "carry"
    loss_weight: str = "rollout"


@dataclass(frozen=True, slots=True)
class Window:
    """A window as it stands: everything that the passes counted so far contained, over all ranks.

    Attributes:
        index: windows closed before this one (>= 0).
        target: units that close a window.
        closes_at: units since the start of counting at which this one closes.
        opened_at: units since the start of counting when it opened.
        passes: passes counted.
        idle_passes: idle (rank, pass) pairs among them.
        rollouts: finished in them.
        prompts: finished in them.
        tokens: loss tokens that they contained.
        weight: sum of the weights.
        total: what the window's step is divided by as it stands: the sum of the weights, or a constant.
        expected: the total that losses are divided by as they go in; 0.0 until a pass contributes.
        closed: whether the last pass counted is the boundary.
    """

    index: int
    target: int
    closes_at: int
    opened_at: int
    passes: int = 0
    idle_passes: int = 0
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: int = 0
    total: float = 0.0
    expected: float = 0.0
    closed: bool = False

    @property
    def correction(self) -> float:
        """Expected / total (> 0): what `step()` multiplies the accumulated gradient by.

        Between the boundary's `backward()` and its `step()`, the gradient that `p.grad` (ZeRO 0) or DeepSpeed's
        `safe_get_full_grad` shows is that of the step once it is multiplied by this. It is 1.0 where the total was
        known when the window began (a look-ahead that covers it, `loss_weight: target`), or nothing weighs anything.
        """
        return self.expected / self.total if self.expected and self.total else 1.0


class Ledger:
    """Counts passes, closes windows and keeps two clocks: `passes` and `windows` (closed, applied or not).

    Fed with sums over all ranks it decides alike on each of them, without talking to any.

    Args:
        rules: what closes a window.
        weighting: how losses are weighed; the rules' `loss_weight` where it is not given.

    Attributes:
        rules: what closes a window.
        weighting: how losses are weighed.
        passes: passes counted since the start.
        consumed: units (rollouts or prompts) of the windows that were closed.
        origin: units consumed where counting last started anew.
        rollouts: rollouts of the windows that were closed.
        progress: units that entered applied steps.
        window: the open window.
    """

    def __init__(self, rules: Rules, weighting: Weighting | None = None) -> None:
        self.rules = rules
        self.weighting = weighting or Weighting.configured(rules.loss_weight, "mean", rules.target)
        self.passes = 0
        self.consumed = 0
        self.origin = 0
        self.rollouts = 0
        self.progress = Progress(rules.target)
        self.window = self._opened(0)

    def weigh_by(self, weighting: Weighting) -> None:
        """Weigh losses otherwise from here on: only between windows, because a window has one denominator.

        Raises:
            WindowError: passes of the open window have been weighed already.
        """
        if self.window.passes:
            raise WindowError(
                f"window {self.window.index} has {self.window.passes} passes that were weighed by "
                f"{self.weighting.name!r}: a window has one denominator; choose {weighting.name!r} before its first "
                "pass"
            )
        self.weighting = weighting

    def count(self, totals: PassTotals, ahead: Sequence[PassTotals] = ()) -> Window:
        """Count one pass; returns the window, `closed` where this pass is the boundary.

        Args:
            totals: what the pass contained over all ranks.
            ahead: the passes after it, as far as they are known; where they reach the boundary, the total is known
                and the expected total is the actual one.

        Raises:
            WindowError: the pass overshoots under `overshoot: error`, or the window is closed already.
        """
        if self.window.closed:
            raise WindowError(
                f"window {self.window.index} is closed and waits for its step(), but another pass was counted; call "
                "step() after every backward()"
            )
        window = self._added(self.window, totals)
        if not window.expected and totals.contributes(self.weighting.unit):
            window = replace(window, expected=self._expected(window, totals, ahead))
        self._refuse_surplus(window)
        self.window = window
        self.passes += 1
        return window

    def closes_with(self, totals: PassTotals) -> bool:
        """Whether one more pass of these `totals` would close the window."""
        return self._added(self.window, totals).closed

    def total(self) -> float:
        """The one denominator of the step: the sum of weights so far, or a constant.

        A constant that is the target makes the loss of Dr. GRPO (arXiv 2503.20783).
        """
        return self.window.total

    def end(self) -> Window:
        """Close the window where it stands, short of its target: the end of the data.

        One that has reached its target is closed already, and stays as it is.
        """
        self.window = replace(self.window, closed=True)
        return self.window

    def settle(self, *, applied: bool) -> Window:
        """Open the next window; returns the one that ended. Progress moves only with a step that was applied.

        Where the data ended inside a window, counting starts anew: the next data's first window is a whole one.
        """
        ended = self.window
        self.consumed += self._units(ended)
        if self.consumed < ended.closes_at:
            self.origin = self.consumed
        self.rollouts += ended.rollouts
        if applied:
            self.progress = self.progress.advanced(self._units(ended))
        self.window = self._opened(ended.index + 1)
        return ended

    def units(self) -> int:
        """Units that the open window holds."""
        return self._units(self.window)

    def state(self) -> dict[str, int]:
        """What a checkpoint needs to go on: taken between windows."""
        return {
            "target": self.rules.target,
            "passes": self.passes,
            "windows": self.window.index,
            "consumed": self.consumed,
            "origin": self.origin,
            "rollouts": self.rollouts,
            "progress_units": self.progress.units,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Go on from `state`; the inverse of `state()`."""
        self.passes = state["passes"]
        self.consumed = state["consumed"]
        self.origin = state["origin"]
        self.rollouts = state["rollouts"]
        self.progress = Progress(self.rules.target, state["progress_units"])
        self.window = self._opened(state["windows"])

    def _units(self, window: Window) -> int:
        return window.prompts if self.rules.count == "prompt" else window.rollouts

    def _opened(self, index: int) -> Window:
        target = self.rules.target
        carried = self.rules.overshoot == "carry"
        surplus = (self.consumed - self.origin) % target if carried else 0
        closes_at = self.consumed + target - surplus
        return Window(index=index, target=target, closes_at=closes_at, opened_at=self.consumed)

    def _added(self, window: Window, totals: PassTotals) -> Window:
        weight, constant = window.weight + self.weighting.of(totals), self.weighting.constant
        window = replace(
            window,
            passes=window.passes + 1,
            idle_passes=window.idle_passes + self.rules.ranks - totals.active,
            rollouts=window.rollouts + totals.rollouts,
            prompts=window.prompts + totals.prompts,
            tokens=window.tokens + totals.tokens,
            weight=weight,
            total=float(weight) if constant is None or not weight else constant,
        )
        return replace(window, closed=window.opened_at + self._units(window) >= window.closes_at)

    def _expected(self, window: Window, totals: PassTotals, ahead: Sequence[PassTotals]) -> float:
        if self.weighting.constant is not None:
            return self.weighting.constant
        known = window
        for later in ahead:
            if known.closed:
                break
            known = self._added(known, later)
        if known.closed and known.weight:
            return float(known.weight)
        # The first contributing pass stands for the window: exact where passes are alike, and any other value > 0
        # is put right at the boundary.
        needed = window.closes_at - window.opened_at
        counted = totals.counted(self.rules.count)
        estimate = needed * max(1, self.weighting.of(totals))
        return estimate / counted if counted else float(estimate)

    def _refuse_surplus(self, window: Window) -> None:
        surplus = window.opened_at + self._units(window) - window.closes_at
        if self.rules.overshoot == "error" and surplus > 0:
            raise WindowError(
                f"window {window.index} holds {self._units(window)} {self.rules.count}s, {surplus} more than its "
                f"target of {window.target}: under ds_parity.overshoot 'error' passes must add up to the target "
                "exactly; pack them so, or choose 'carry' or 'reset'"
            )
