"""The window: which pass closes it, and what the step's loss is divided by. A state machine to test on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_parity.errors import WindowError
from ds_parity.window.counts import PassTotals
from ds_parity.window.progress import Progress


@dataclass(frozen=True, slots=True)
class Rules:
    """What closes a window and what a loss is weighed by; the words are those of the configuration.

    Attributes:
        target: units over all data-parallel ranks that close a window (>= 1).
        ranks: data-parallel ranks (>= 1).
        count: `rollout` or `prompt`, the unit of the target.
        overshoot: `carry`, `reset` or `error`, what a surplus does.
        loss_weight: `rollout`, `token`, `pass` or `target`; or `share`, no word of the configuration: losses are divided
            already, so that the step's is their sum over passes, averaged over ranks.
    """

    target: int
    ranks: int
    count: str = "rollout"
    overshoot: str = "carry"
    loss_weight: str = "rollout"

    @property
    def constant(self) -> float | None:
        """The total of every window that has a weight, where it doesn't follow from what the window holds."""
        return {"target": float(self.target), "share": float(self.ranks)}.get(self.loss_weight)


@dataclass(frozen=True, slots=True)
class Window:
    """A window as it stands: everything that the passes counted so far held, over all ranks.

    Attributes:
        index: windows closed before this one (>= 0).
        target: units that close a window.
        closes_at: units since the start of counting at which this one closes.
        opened_at: units since the start of counting when it opened.
        passes: passes counted.
        idle_passes: idle (rank, pass) pairs among them.
        rollouts: finished in them.
        prompts: finished in them.
        tokens: loss tokens that they held.
        weight: sum of the weights.
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
    expected: float = 0.0
    closed: bool = False


class Ledger:
    """Counts passes, closes windows and keeps two clocks: `passes` and `windows` (closed, applied or not).

    Fed with sums over all ranks it decides alike on each of them, without talking to any.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.passes = 0
        self.consumed = 0
        self.origin = 0
        self.rollouts = 0
        self.progress = Progress(rules.target)
        self.window = self._opened(0)

    def count(self, held: PassTotals, ahead: Sequence[PassTotals] = ()) -> Window:
        """Count one pass; returns the window, `closed` where this pass is the boundary.

        Args:
            held: what the pass held over all ranks.
            ahead: the passes after it, as far as they are known; where they reach the boundary, the total is known
                and the expected total is the actual one.

        Raises:
            WindowError: the pass overshoots under `overshoot: error`, or the window is closed already.
        """
        if self.window.closed:
            raise WindowError(
                f"window {self.window.index} is closed and waits for its step(), but another pass was counted; call step() "
                "after every backward()"
            )
        window = self._added(self.window, held)
        if not window.expected and held.contributes(self.rules.loss_weight):
            window = replace(window, expected=self._expected(window, held, ahead))
        self._refuse_surplus(window)
        self.window = window
        self.passes += 1
        return window

    def closes_with(self, held: PassTotals) -> bool:
        """Whether one more pass that holds `held` would close the window."""
        return self._added(self.window, held).closed

    def total(self) -> float:
        """The one denominator of the step: the sum of weights so far, or a constant (the target: Dr. GRPO)."""
        constant = self.rules.constant
        return float(self.window.weight) if constant is None or not self.window.weight else constant

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

    def _added(self, window: Window, held: PassTotals) -> Window:
        window = replace(
            window,
            passes=window.passes + 1,
            idle_passes=window.idle_passes + self.rules.ranks - held.active,
            rollouts=window.rollouts + held.rollouts,
            prompts=window.prompts + held.prompts,
            tokens=window.tokens + held.tokens,
            weight=window.weight + held.weight(self.rules.loss_weight),
        )
        return replace(window, closed=window.opened_at + self._units(window) >= window.closes_at)

    def _expected(self, window: Window, held: PassTotals, ahead: Sequence[PassTotals]) -> float:
        if self.rules.constant is not None:
            return self.rules.constant
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
        counted = held.counted(self.rules.count)
        estimate = needed * max(1, held.weight(self.rules.loss_weight))
        return estimate / counted if counted else float(estimate)

    def _refuse_surplus(self, window: Window) -> None:
        surplus = window.opened_at + self._units(window) - window.closes_at
        if self.rules.overshoot == "error" and surplus > 0:
            raise WindowError(
                f"window {window.index} holds {self._units(window)} {self.rules.count}s, {surplus} more than its target of "
                f"{window.target}: under ds_parity.overshoot 'error' passes must add up to the target exactly; pack "
                "them so, or choose 'carry' or 'reset'"
            )
