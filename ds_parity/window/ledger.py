"""Which pass closes a window, and what the step's loss is divided by. A state machine to test on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ds_parity.errors import WindowError
from ds_parity.window.counts import Counts, PassTotals, WindowTotals, added
from ds_parity.window.progress import Progress
from ds_parity.window.promise import Promise
from ds_parity.window.standing import Window
from ds_parity.window.terms import Terms
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
        by_caller: the caller ends a window, whatever it holds; `target` is nominal then, and may be 0.
    """

    target: int
    ranks: int
    count: str = "rollout"
    overshoot: str = "carry"
    loss_weight: str = "rollout"
    by_caller: bool = False


class Ledger:
    """Counts passes, closes windows and keeps two clocks: `passes` and `windows` (closed, applied or not).

    Fed with sums over all ranks it decides alike on each of them, without talking to any. Where the caller ends windows
    it is fed with this rank's own micro-batches (`count_own`), and with what they add up to over ranks at the end
    (`end_with`): until then `window` is what this rank has run, and `passes` counts its own.

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
        promised: what the open window will contain over all ranks, None where nobody has said so.
        last_total: the sum of weights of the last window that had any, 0.0 before it; kept where the caller ends
            windows, whose totals are known at their end alone.
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
        self.last_total = 0.0
        self.promised: Promise | None = None
        self.drops = False  # the open window will take no step, whatever it contains
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

    def count(self, totals: PassTotals, ahead: Sequence[PassTotals] = (), *, whole: bool = False) -> Window:
        """Count one pass; returns the window, `closed` where this pass is the boundary.

        Args:
            totals: what the pass contained over all ranks.
            ahead: the passes after it, as far as they are known; where they reach the boundary, the total is known
                and the expected total is the actual one.
            whole: they reach the boundary, or the end of the data before it.

        Raises:
            WindowError: the pass overshoots under `overshoot: error`; the window is closed already, or contains
                something else than was promised; or its totals must be known before its first backward, and are not.
        """
        self._refuse_closed()
        window = self._added(self.window, totals)
        if not window.expected and totals.contributes(self.weighting.unit):
            window = self._divided(window, totals, ahead, whole)
        self._refuse_surplus(window)
        self.window = self._checked(window)
        self.passes += 1
        return window

    def count_own(self, counts: Counts) -> Window:
        """Count one micro-batch of this rank, in a window that the caller ends."""
        self._refuse_closed()
        self.passes += 1
        self.window = self._plus(self.window, counts, ranks=1)
        return self.window

    def expect(self, total: float) -> None:
        """Divide the losses of the open window by `total` (> 0), until its own total is known.

        Raises:
            WindowError: the totals of its terms must be known before its first backward, and are not.
        """
        if self.promised is not None and self.promised_total:
            self.window = self._divided_by(self.window, self.promised_total, self.promised.totals.weights)
        elif self.window.passes or not self.weighting.needs_totals:
            self.refuse_unknown_totals()
            self.window = replace(self.window, expected=total)

    @property
    def promised_total(self) -> float:
        """The sum of weights that the open window was promised to contain; 0.0 where nobody has said so."""
        return 0.0 if self.promised is None else float(self.promised.totals.weight)

    def promise(self, promise: Promise) -> None:
        """Take note of what the coming window will contain over all ranks; it is held against it at its end."""
        self.promised = promise
        self.window = replace(self.window, expected=0.0, divisors=())

    def end_with(self, totals: WindowTotals) -> Window:
        """Close the window at the caller's word, with what it contains over all ranks."""
        self._refuse_closed()
        window = self.window
        ended = replace(
            window,
            passes=totals.passes,
            idle_passes=totals.passes * self.rules.ranks - totals.active,
            micro_batches=totals.active,
            rollouts=totals.rollouts,
            prompts=totals.prompts,
            tokens=totals.tokens,
            weight=totals.weight,
            weights=totals.weights,
            total=self._total_of(totals.weight),
            expected=window.expected if totals.active else 0.0,
            closed=True,
        )
        self.window = self._checked(ended)
        # From here on every rank stands at the same pass, whatever it has run itself.
        self.passes += totals.passes - window.passes
        self.last_total = float(totals.weight) or self.last_total
        return self.window

    def closes_with(self, totals: PassTotals) -> bool:
        """Whether one more pass of these `totals` would close the window."""
        return self._added(self.window, totals).closed

    def reaches_boundary(self, ahead: Sequence[PassTotals]) -> bool:
        """Whether the passes of `ahead` close the open window."""
        window = self.window
        for totals in ahead:
            window = self._added(window, totals)
            if window.closed:
                return True
        return False

    def total(self) -> float:
        """The one denominator of the step: the sum of weights so far, or a constant.

        A constant that is the target makes the loss of Dr. GRPO (arXiv 2503.20783).
        """
        return self.window.total

    def drop(self) -> None:
        """Take note that the open window will take no step: what it was to contain is of no matter."""
        self.drops = True

    def end(self) -> Window:
        """Close the window where it stands, short of its target: the end of the data.

        One that has reached its target is closed already, and stays as it is.
        """
        self.window = self._checked(replace(self.window, closed=True))
        return self.window

    def settle(self, *, applied: bool) -> Window:
        """Open the next window; returns the one that ended. Progress moves only with a step that was applied.

        Where the data ended inside a window, counting starts anew: the next data's first window is a whole one.
        """
        ended = self.window
        self.consumed += self._units(ended)
        # A window that its caller ends has no surplus, whatever it held, and one of "reset" leaves none to a run that
        # goes on from a checkpoint with "carry".
        if self.rules.by_caller or self.rules.overshoot != "carry" or self.consumed < ended.closes_at:
            self.origin = self.consumed
        self.rollouts += ended.rollouts
        if applied:
            self.progress = self.progress.advanced(self._units(ended))
        self.promised, self.drops = None, False
        self.window = self._opened(ended.index + 1)
        return ended

    def begin_anew(self) -> None:
        """Forget a surplus, between windows: the data ended there, and the next data's first window is a whole one."""
        self.origin = self.consumed
        self.window = replace(self.window, closes_at=self._opened(self.window.index).closes_at)

    def units(self) -> int:
        """Units that the open window holds."""
        return self._units(self.window)

    def state(self) -> dict[str, int | float]:
        """What a checkpoint needs to go on: taken between windows."""
        return {
            "target": self.rules.target,
            "passes": self.passes,
            "windows": self.window.index,
            "consumed": self.consumed,
            "origin": self.origin,
            "rollouts": self.rollouts,
            "progress_units": self.progress.units,
            **({"last_total": self.last_total} if self.rules.by_caller else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; the inverse of `state()`."""
        self.passes = state["passes"]
        self.consumed = state["consumed"]
        self.origin = state["origin"]
        self.rollouts = state["rollouts"]
        self.progress = Progress(self.rules.target, state["progress_units"])
        self.last_total = float(state.get("last_total", 0.0))
        self.promised, self.drops = None, False
        self.window = self._opened(state["windows"])

    def _units(self, window: Window) -> int:
        return window.prompts if self.rules.count == "prompt" else window.rollouts

    def _opened(self, index: int) -> Window:
        target = self.rules.target
        carried = self.rules.overshoot == "carry"
        surplus = (self.consumed - self.origin) % target if carried and not self.rules.by_caller else 0
        closes_at = self.consumed + target - surplus
        return Window(index=index, target=target, closes_at=closes_at, opened_at=self.consumed)

    def _added(self, window: Window, totals: PassTotals) -> Window:
        window = self._plus(window, totals, self.rules.ranks)
        reached = window.opened_at + self._units(window) >= window.closes_at
        return replace(window, total=self._total_of(window.weight), closed=reached and not self.rules.by_caller)

    def _plus(self, window: Window, held: Counts | PassTotals, ranks: int) -> Window:
        return replace(
            window,
            passes=window.passes + 1,
            idle_passes=window.idle_passes + ranks - held.active,
            micro_batches=window.micro_batches + held.active,
            rollouts=window.rollouts + held.rollouts,
            prompts=window.prompts + held.prompts,
            tokens=window.tokens + held.tokens,
            weight=window.weight + self.weighting.of(held),
            weights=added(window.weights, held.weights),
        )

    def _refuse_closed(self) -> None:
        if self.window.closed:
            way_out = "load a checkpoint" if self.rules.by_caller else "call step() after every backward()"
            raise WindowError(
                f"window {self.window.index} is closed and waits for its step(), but another pass was counted; "
                f"{way_out}"
            )

    def _total_of(self, weight: float) -> float:
        if weight == math.inf:
            raise WindowError(
                f"the weights of window {self.window.index} add up to infinity, so that its mean is a mean of nothing; "
                "give weights whose sum is a float"
            )
        constant = self.weighting.constant
        return float(weight) if constant is None or not weight else constant

    def _divided(self, window: Window, totals: PassTotals, ahead: Sequence[PassTotals], whole: bool) -> Window:
        """Return the window with what its losses are divided by, from its first pass with a gradient on."""
        if self.promised is not None and self.promised_total:
            return self._divided_by(window, self.promised_total, self.promised.totals.weights)
        known = window
        for later in ahead:
            if known.closed:
                break
            known = self._added(known, later)
        if (known.closed or whole) and known.weight:
            return self._divided_by(window, known.weight, known.weights)
        self.refuse_unknown_totals()
        return replace(window, expected=self._estimate(window, totals))

    def _divided_by(self, window: Window, weight: float, weights: tuple[float, ...]) -> Window:
        divisors = self.weighting.terms.divisors(weights) if self.weighting.terms else ()
        constant = self.weighting.constant
        return replace(window, expected=float(weight) if constant is None else constant, divisors=divisors)

    def refuse_unknown_totals(self) -> None:
        """Raise WindowError where the window's totals must be known before its first backward, and are not."""
        if self.weighting.needs_totals and self.weighting.terms and self.promised is None:
            units = ", ".join(f"{term.name} by {term.unit}" for term in self.weighting.terms)
            same = len({term.unit for term in self.weighting.terms}) == 1
            why = "weights of its own for each term" if same else "different units"
            raise WindowError(
                f"backward() in window {self.window.index}, whose totals are not known: the terms of ds_parity.terms "
                f"are means over {why} ({units}), and one accumulated gradient can't be corrected by several "
                "factors. Call engine.expect(rollouts=..., tokens=...) before the window's first backward(), on every "
                "rank with what it will run; or take micro-batches from passes() with ds_parity.lookahead 'window', "
                "from one stream, because a window must lie in one (itertools.chain makes one of several), and without "
                "finish=False, behind which another may follow; or give all terms one unit, rollout, token or pass"
            )

    def _checked(self, window: Window) -> Window:
        """Return a window; raise WindowError where it is closed and has no right step.

        Its losses were divided by something else, or one of its terms has no mean.
        """
        if not window.closed or self.drops:
            return window
        if self.promised is not None:
            self.promised.refuse_other(window)
        terms = self.weighting.terms
        if terms is not None and self.promised is None and window.divisors:
            self._refuse_other_totals(window, terms)
        if terms is not None and not window.divisors and len(set(window.weights)) > 1:
            terms.refuse_terms_of_nobody(window.weights)  # to know the totals ahead would not help those
            weights = _listed(terms, window.weights)
            raise WindowError(
                f"the terms of ds_parity.terms weigh differently in window {window.index} ({weights}): some "
                "micro-batches lack one, and one accumulated gradient can't be corrected by several factors; give each "
                "term in every pass, or tell the totals before: engine.expect(..., weight={name: ...}), or passes() "
                "with ds_parity.lookahead 'window' over micro-batches whose weight is {name: 0} for what they lack"
            )
        return window

    def _refuse_other_totals(self, window: Window, terms: Terms) -> None:
        """Raise WindowError where losses were divided by the totals of other passes than those that ran."""
        pairs = zip(window.divisors, terms.divisors(window.weights), strict=True)
        factors = [one / other for one, other in pairs if other]
        # Terms of one unit are corrected by one factor, whatever it is.
        right = 1.0 if self.weighting.needs_totals else factors[0]
        if all(math.isclose(factor, right, rel_tol=1e-9) for factor in factors):
            return
        raise WindowError(
            f"window {window.index} contains {_listed(terms, window.weights)}, and its losses were divided by what "
            "passes() had read ahead of it, which was something else: the loop left passes() inside the window, and "
            "what had been read was lost. One accumulated gradient can't be corrected by several factors, so no step "
            "is taken. Run all passes of a window, or set ds_parity.last_window to 'drop' and call finish() where a "
            "loop is left; to go on from here, load a checkpoint"
        )

    def _estimate(self, window: Window, totals: PassTotals) -> float:
        if self.weighting.constant is not None:
            return self.weighting.constant
        # The first contributing pass stands for the window: exact where passes are alike, and any other value > 0
        # is put right at the boundary.
        needed = window.closes_at - window.opened_at
        counted = totals.counted(self.rules.count)
        estimate = needed * (self.weighting.of(totals) or 1)
        return estimate / counted if counted else float(estimate)

    def _refuse_surplus(self, window: Window) -> None:
        surplus = window.opened_at + self._units(window) - window.closes_at
        if self.rules.overshoot == "error" and surplus > 0:
            raise WindowError(
                f"window {window.index} holds {self._units(window)} {self.rules.count}s, {surplus} more than its "
                f"target of {window.target}: under ds_parity.overshoot 'error' passes must add up to the target "
                "exactly; pack them so, or choose 'carry' or 'reset'"
            )


def _listed(terms: Terms, weights: tuple[float, ...]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in zip(terms.names, weights, strict=True))
