"""Two traces side by side, as the rules look at them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ds_parity.parity.comparison.bounds import DRIFT, EPS, LEAST_LOSS
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.comparison.fields import Comparison, Difference, plain
from ds_parity.parity.comparison.notes import apart_at_start
from ds_parity.parity.diagnosis.effects import COUNTED, TRAINED_ON, effect, loss_by_rates, step_lengths
from ds_parity.parity.diagnosis.lengths import forgetting
from ds_parity.parity.diagnosis.nearness import finite_ratio, near
from ds_parity.trace import StepRecord, Trace
from ds_parity.trace.records import METRIC

# Of what training moves them: weights that are nearer agree, and prove it.
_TELLING = 0.1
_FAR = 0.2
# Of what rates that are off would move a loss by, at the least: gradients of other rows have another direction.
_OF_OTHER_ROWS = 0.01
# Of a loss, which four digits leave open: other initial weights may change it by less, and the norm by a hundredth.
_WIDE = 2e-5
_SHOWN_BY = ("loss", "grad_norm")
# Of its largest value: a divergence from the first weights is below it in the first step.
_AT_FIRST = 0.5
_MADE_UP = 1e-4
# An update that is another one takes a norm apart by a hundredth of a divergence that is not small, or less.
_OF_A_METRIC = 1e-4
# In bf16 and fp16 a norm hides another update. Of 42 logs whose losses alone differed, behind such updates norms were
# 0.03 to 0.46 times as far apart as losses, and 0 to 0.005 times where losses were logged wrong, but for one (0.028).
_NEARER = 0.01
_CLOSE, _STEPS = 1e-4, 3  # of a number, and how many of them


@dataclass(frozen=True)
class View:
    """What a comparison found, ready to be asked.

    Attributes:
        reference: the trace that is right, or an excerpt of it.
        candidate: the trace in question, or the same steps of it.
        comparison: of the whole traces.
        begin: the numbers of the first steps of the whole traces, the reference's first; of no excerpt they are those
            that it has.
    """

    reference: Trace
    candidate: Trace
    comparison: Comparison
    begin: tuple[int, int] | None = None

    @cached_property
    def pairs(self) -> list[tuple[StepRecord, StepRecord]]:
        """Steps that both have."""
        by_step = {record.step: record for record in self.candidate.steps}
        return [(record, by_step[record.step]) for record in self.reference.steps if record.step in by_step]

    @cached_property
    def ranks(self) -> int:
        """Data-parallel ranks; the torch reference runs on one whatever it stands for."""
        return max(self.reference.header.ranks or 1, self.candidate.header.ranks or 1)

    @cached_property
    def fields(self) -> set[str]:
        """Fields that differ in any step of the whole traces; metrics as one."""
        return {plain(difference.name) for difference in self.comparison.found}

    @cached_property
    def other_metrics(self) -> set[str]:
        """The names of metrics that differ in any step: more than rounding changes them."""
        found = (it.name for it in self.comparison.found if it.name.startswith(METRIC))
        return {name.removeprefix(METRIC) for name in found}

    @cached_property
    def first(self) -> int:
        """Index into `pairs` of the first step that differs; their number where none does."""
        steps = {d.step for d in self._differences if d.step is not None}
        return next((i for i, (a, _) in enumerate(self.pairs) if a.step in steps), len(self.pairs))

    @property
    def begins(self) -> tuple[int, int]:
        """The numbers of the first steps of the whole traces, the reference's first."""
        return self.begin or (self.reference.steps[0].step, self.candidate.steps[0].step)

    def step(self, index: int) -> int:
        """The number of a step by its index into `pairs`: traces may begin anywhere, and excerpts do."""
        return self.pairs[index][0].step

    @property
    def is_excerpt(self) -> bool:
        """Whether the record begins behind the first step."""
        return self.step(0) > 1

    @cached_property
    def at_first(self) -> set[str]:
        """Fields that differ in the first step that does."""
        if self.first == len(self.pairs):
            return set()
        step = self.pairs[self.first][0].step
        return {plain(d.field) for d in self._differences if d.step == step}

    @cached_property
    def _differences(self) -> list[Difference]:
        """Those that are known, with the first of each field: of very many the others are not kept."""
        return [*self.comparison.differences, *(it.first for it in self.comparison.found)]

    @cached_property
    def norms_alone(self) -> View | None:
        """The steps up to the first in which another field differs than gradient norms, side by side on their own.

        The whole view where no other field does; None where another one differs as soon as a norm, or where the norms
        of these steps lie within the bounds of so few.
        """
        alone = self if self.fields == {"grad_norm"} else self.alone("grad_norm")
        return alone if alone is not None and "grad_norm" in alone.fields else None

    @property
    def rates_differ_behind_norms(self) -> bool:
        """Whether a rate is the first to differ behind gradient norms: that comes of another fault than they do."""
        second = self._second("grad_norm")
        return self.at_first == {"grad_norm"} and second is not None and "lr" in second[1]

    def alone(self, field: str) -> View | None:
        """Return the steps in front of the first one in which more differs than a field, side by side on their own.

        Args:
            field: such as "lr", which differs in some of them.

        Returns:
            None where nothing else differs, or where something does as soon as the field.
        """
        second = self._second(field)
        if second is None or field not in self.at_first or second[0] <= self.step(self.first):
            return None
        a, b = (
            replace(trace, steps=tuple(it for it in trace.steps if it.step < second[0]))
            for trace in (self.reference, self.candidate)
        )
        return self.of(a, b)

    def of(self, reference: Trace, candidate: Trace) -> View:
        """Return what is made of both traces, compared as they are."""
        comparison = compare(reference, candidate, self.comparison.tier, self.comparison.dtype)
        return View(reference, candidate, comparison, self.begins)

    def _second(self, field: str) -> tuple[int, set[str]] | None:
        """The first step in which another field differs, and which do; None where no step shows one."""
        others = [it for it in self.comparison.found if plain(it.name) != field and it.first.step is not None]
        until = min((it.first.step for it in others if it.first.step is not None), default=None)
        return None if until is None else (until, {plain(it.name) for it in others if it.first.step == until})

    def recorded(self, name: str) -> bool:
        """Whether both sides hold a field in every common step but skipped ones, which have no gradient norm."""
        held = [pair for pair in self.pairs if not pair[0].skipped]
        return bool(held) and all(getattr(one, name) not in (None, {}) for pair in held for one in pair)

    def agrees(self, name: str) -> bool:
        """Whether a field was recorded, compared and equal in every step; for weights: and that says something."""
        if name in self.fields or name in self.comparison.not_compared or not self.recorded(name):
            return False
        return name != "weights" or self.weights_tell

    @cached_property
    def loose(self) -> bool:
        """Whether a loss may be another in the first step that differs, and pass: its type, or its digits, are short.

        A gradient may have turned by half of its length, and the loss still lie within what bf16 rounds of it.
        """
        if self.comparison.dtype in DRIFT:
            return True
        # Of rounded losses that are not the same some digit is off, whatever lies within the bound.
        apart = self.first < len(self.pairs) and len({one.loss for one in self.pairs[self.first]}) > 1
        return any(apart or digits > _WIDE for digits in self._digits_of_losses)

    @property
    def loss_digits(self) -> float:
        """The share of a loss that its digits leave open in the first step that differs; 0 where they are whole."""
        return max(self._digits_of_losses, default=0.0)

    @property
    def _digits_of_losses(self) -> list[float]:
        sides = self.pairs[self.first] if self.first < len(self.pairs) else ()
        traces = self.reference, self.candidate
        held = [(trace.precision.get("loss"), one.loss) for trace, one in zip(traces, sides, strict=bool(sides))]
        return [how.slack(x) / max(abs(x), LEAST_LOSS) for how, x in held if how and x is not None]

    @property
    def unseen(self) -> bool:
        """Whether the weights before the first difference are not recorded: an update may have been another one."""
        before = self.pairs[: self.first]
        return self.steps_left_out or (bool(before) and any(one.weights is None for one in before[-1]))

    @property
    def steps_left_out(self) -> bool:
        """Whether steps in front of the first difference are in neither record: any of their parts may be another.

        Trainers log every tenth step, and a trace of a resumed run begins in the middle of one.
        """
        if self.first == len(self.pairs):
            return False
        if self.first:
            return self.step(self.first) - self.step(self.first - 1) > 1
        return self.is_excerpt and not self._one_start

    @property
    def _one_start(self) -> bool:
        """Whether both sides hold the weights in front of the first common step, and they are the same."""
        starts = [one.header.start for one in (self.reference, self.candidate)]
        return None not in starts and starts[0] == starts[1] and set(self.begins) == {self.step(0)}

    @cached_property
    def weights_differ(self) -> bool:
        """Whether both sides hold other weights in a step: weights that one side leaves out show no other training."""
        found = [it for it in self._differences if it.field == "weights"]
        return any(None not in (it.reference, it.candidate) for it in found)

    @cached_property
    def weights_apart(self) -> float | None:
        """How far the weights lie apart at most, as a share of what training moves them; None where it isn't known.

        What training moves is known from the sketches of the reference; weights of one checksum are not apart at all.
        """
        held = [(a.weights, b.weights) for a, b in self.pairs if a.weights is not None and b.weights is not None]
        if not held or len(held) < len(self.pairs):
            return None
        if all(a.checksum == b.checksum for a, b in held):
            # Weights that training moves nowhere agree whatever it does.
            return 0.0 if len({a.checksum for a, _ in held}) > 1 else None
        first, last = held[0][0], held[-1][0]
        if len(held) < 2 or not all(
            first.sketch and len(first.sketch) == len(it.sketch) for pair in held for it in pair
        ):
            return None
        moved = math.dist(first.sketch, last.sketch)
        apart = max(math.dist(a.sketch, b.sketch) for a, b in held)
        return apart / moved if moved > 0 else None

    @property
    def weights_tell(self) -> bool:
        """Whether weights that agree show that training agreed: they are much nearer than training moves them."""
        return self.weights_apart is not None and self.weights_apart < _TELLING

    @cached_property
    def trained_alike(self) -> bool:
        """Whether the record proves that both sides trained alike, so that only what is logged can differ.

        Weights prove it that are nearer than a loss, an LR or a norm as far off as the logged ones would leave them,
        unless what differs is a length of gradients that they forget. So do gradient norms that agree in every step
        where losses or metrics are far apart: another loss, or other data, has other gradients. Without weights each
        norm still follows from the weights of the step before, but only one that is written in full shows them. That
        rates were the same is shown by losses and norms that rates as far off as the logged ones would have moved.
        """
        if "step" in self.fields or self.weights_differ or len(self.pairs) < 2:
            return False
        if "skipped" in self.fields:
            return self._steps_taken_alike
        if not self.recorded("weights"):
            return self._shown_without_weights
        if (self.weights_alike and not self.forgetting) or self._norms_tell:
            return True
        # Where a rate of 0 moves no weights, norms and losses show what they do without weights.
        return self.weights_apart == 0.0 and self._shown_without_weights

    @property
    def _shown_without_weights(self) -> bool:
        rounded = self.reference.precision.keys() | self.candidate.precision.keys()
        equal = self.fields <= COUNTED and self._equal_in_every_digit
        if not self.agrees("grad_norm") or ("grad_norm" in rounded and not equal):
            return False
        if self.fields & {"lr"}:
            return "loss" not in rounded and self._rates_would_show
        return equal or self._norms_tell_alone

    @property
    def _equal_in_every_digit(self) -> bool:
        """Whether losses and norms are equal, and written closely enough that those of other windows are not."""
        for field in _SHOWN_BY:
            sides = [(getattr(a, field), getattr(b, field)) for a, b in self.pairs]
            numbers = {x for x, y in sides if x == y and x}
            written = [how for trace in (self.reference, self.candidate) if (how := trace.precision.get(field))]
            close = all(how.slack(x) <= _CLOSE * abs(x) for how in written for x in numbers)
            if len(numbers) < max(_STEPS, len(sides)) or not close:
                return False
        return True

    @cached_property
    def weights_alike(self) -> bool:
        """Whether the weights are much nearer than a loss, an LR or a norm as far off as logged would leave them.

        The least of them counts: a norm that is hardly off is not proved wrong by a loss that is far off.
        """
        if self.fields & {"step", "skipped", "weights"} or len(self.pairs) < 2 or not self.recorded("weights"):
            return False
        if self._make_up_for_each_other:
            return False
        apart = self.weights_apart
        if apart == 0.0:
            return self._any_was_taken
        return apart is not None and apart < _TELLING * min(self._effects)

    @property
    def rates_agree_to_fp32(self) -> bool:
        """Whether no rate of the whole record is off by more than rounding, also where no stretch shows it."""
        apart = [it.furthest for it in self.comparison.found if plain(it.name) == "lr"]
        return all(it is not None and it <= EPS["fp32"] for it in apart)

    @property
    def _make_up_for_each_other(self) -> bool:
        """Whether gradients are longer by what rates are smaller by, in every step: SGD takes the same steps then."""
        if not {"lr", "grad_norm"} <= self.fields:
            return False
        # Neither a skipped step nor one without a gradient takes one.
        taken = [
            (a, b) for a, b in self.pairs if not (a.skipped and b.skipped) and (a.grad_norm, b.grad_norm) != (0, 0)
        ]
        if not all(a.lr and b.lr and len(a.lr) == len(b.lr) and a.grad_norm and b.grad_norm for a, b in taken):
            return False
        moved = [
            (x * (a.grad_norm or 0.0), y * (b.grad_norm or 0.0))
            for a, b in taken
            for x, y in zip(a.lr or (), b.lr or (), strict=True)
        ]
        rounding = max(_MADE_UP, 2 * EPS[self.comparison.dtype])
        return bool(moved) and all(near(y, x, rounding) for x, y in moved)

    @property
    def _any_was_taken(self) -> bool:
        """Whether a step that differs in what it trains on was taken: no number moves weights in any other."""
        # A mean over all steps is of none.
        steps = {it.step for it in self._differences if plain(it.field) in TRAINED_ON} - {None}
        return not steps or not steps <= {a.step for a, b in self.pairs if _both_idle(a, b)}

    @property
    def _steps_taken_alike(self) -> bool:
        """Whether weights of one checksum show that steps were taken which one side calls skipped."""
        taken = [False, *(x.weights != y.weights for (x, _), (y, _) in pairwise(self.pairs))]
        flagged = [moved for moved, (a, b) in zip(taken, self.pairs, strict=True) if a.skipped != b.skipped]
        return self.weights_apart == 0.0 and all(flagged)

    @property
    def updated_alike(self) -> bool:
        """Whether the record proves that the learning rates were the same: weights show them, whatever they forget."""
        return self.weights_alike or self.trained_alike

    @cached_property
    def forgetting(self) -> str:
        """What may keep weights alike though gradients have another length, in words; empty where nothing does."""
        if not self.weights_alike or self._lengths_agree or not self.fields & {"loss", "grad_norm", "total"}:
            return ""
        return forgetting(self.reference, self.candidate, self.pairs)

    @property
    def _lengths_agree(self) -> bool:
        """Whether gradients have one length: their norms are much nearer than a loss as far off would leave them."""
        return self.agrees("grad_norm") and self._norms_apart <= _TELLING * min(self._effects)

    @property
    def _norms_tell(self) -> bool:
        """Whether gradient norms agree in every step, and much more closely than losses or metrics.

        That weights were recorded adds nothing here: those that tell have told before this is asked.
        """
        if self.fields & {"lr"} or not self.agrees("grad_norm") or not self.fields & {"loss", "metrics"}:
            return False
        if self.fields & {"metrics"}:
            return self.agrees("loss") and self._norms_tell_alone
        most = max(self._effects)
        return most > _FAR and self._norms_apart < _TELLING * most and not self._loss_may_follow_weights

    @property
    def _norms_tell_alone(self) -> bool:
        """Whether gradient norms that agree show, without weights, that what else differs was only logged."""
        # Norms that lie within a wide bound, as far apart as the losses, show another training as well as the same.
        effects = [effect(name, self.pairs, None) for name in sorted(self.fields & (TRAINED_ON | {"metrics"}))] or [1.0]
        if self._loss_may_follow_weights:
            return False
        if "metrics" in self.fields and "loss" not in self.fields:
            telling = 0.0 if self._may_be_a_divergence else _OF_A_METRIC
        else:
            telling = _TELLING
        return self._norms_apart == 0.0 or self._norms_apart < telling * min(effects)

    @property
    def _loss_may_follow_weights(self) -> bool:
        """Whether a loss may be off because the weights are, where a norm hardly shows these.

        That may be so behind the first step. In a short type a loss may be off by more, because a norm that another
        update moved lies within its bound, unless norms are far nearer. Metrics that differ, in front of it or by more,
        prove nothing against it.
        """
        most = max((effect(name, self.pairs, None) for name in sorted(self.fields & TRAINED_ON)), default=1.0)
        from_the_start = self.step(0) == 1 and effect("loss", self.pairs[:1], None) > _TELLING * most
        others = [it for it in self._differences if it.step is not None and plain(it.field) != "metrics"]
        first = min((it.step for it in others if it.step is not None), default=None)
        at_first = {plain(it.field) for it in others if it.step == first}
        near_enough = self.comparison.dtype not in DRIFT or self._norms_apart <= _NEARER * self._losses_apart
        return "loss" in at_first and not from_the_start and (most <= _FAR or not near_enough)

    @property
    def _losses_apart(self) -> float:
        """How far two losses lie apart at most, relative to no less than the terms that may cancel in them."""
        losses = [(a.loss, b.loss) for a, b in self.pairs if a.loss is not None and b.loss is not None]
        return max((abs(y - x) / max(LEAST_LOSS, abs(x)) for x, y in losses), default=0.0)

    @property
    def _may_be_a_divergence(self) -> bool:
        """Whether a metric that differs may be one from the first weights, such as a KL.

        An update that is another one changes it by as much as itself, and a norm by less than its last digits. In the
        first step it is hardly anything, where other metrics are as large as later. NaN and inf are no other update's.
        """
        for name in self.reference.steps[0].metrics.keys() & self.other_metrics:
            pairs = [(a.metrics.get(name, math.nan), b.metrics.get(name, math.nan)) for a, b in self.pairs]
            known = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
            if all(x == y for x, y in known):
                continue
            if self.step(0) != 1 or abs(known[0][0]) <= _AT_FIRST * max(abs(x) for x, _ in known):
                return True
        return False

    @property
    def _rates_would_show(self) -> bool:
        """Whether losses and norms are nearer than rates as far off as the logged ones would leave them.

        Rounding alone may keep them alike in a short type, whose weights do not move by a small rate, and losses or
        norms that never change show no weights. Where losses differ, norms show it that are the same to fp32.
        """
        if any(len({getattr(a, it) for a, _ in self.pairs}) < 2 for it in _SHOWN_BY):
            return False
        if not self.agrees("loss") and self._norms_apart > EPS["fp32"]:
            return False
        types = {it.header.dtype for it in (self.reference, self.candidate)} - {None}
        rounding = max(EPS.get(it or "", 1.0) for it in (types or {"bf16"}) | {self.comparison.dtype})
        losses = [(a.loss, b.loss) for a, b in self.pairs if a.loss is not None and b.loss is not None]
        greatest = max([LEAST_LOSS, *(abs(x) for x, _ in losses)])
        shown = losses if self.agrees("loss") else []
        apart = max([self._norms_apart, *(abs(y - x) / greatest for x, y in shown)])
        moved = loss_by_rates(self.pairs)
        return math.isfinite(moved) and max(rounding, apart) < _OF_OTHER_ROWS * moved

    @property
    def _norms_apart(self) -> float:
        return max((abs(ratio - 1) for ratio in self.ratios("grad_norm") if ratio is not None), default=1.0)

    @cached_property
    def _effects(self) -> list[float]:
        """How far weights would be apart if what is logged were what was trained, by field (`effect`)."""
        lengths = step_lengths(self.reference, self.pairs)
        return [effect(name, self.pairs, lengths) for name in sorted(self.fields & TRAINED_ON)] or [1.0]

    @property
    def compared_after_the_first(self) -> list[str]:
        """Which of weights, gradient norm and loss both sides hold in every step after the first but skipped ones."""
        later = [pair for pair in self.pairs[1:] if not pair[0].skipped]
        names = ("weights", "grad_norm", "loss")
        in_every_step = {name: all(getattr(one, name) is not None for pair in later for one in pair) for name in names}
        return [name for name in names if later and in_every_step[name]]

    @property
    def same_windows(self) -> bool:
        """Whether every step holds the same rollouts in both."""
        return not self.fields & {"rollouts", "step"}

    @cached_property
    def totals(self) -> list[float]:
        """The reference's denominators; 0 where it has none."""
        return [a.total or 0.0 for a, _ in self.pairs]

    def ratios(self, name: str) -> list[float | None]:
        """Return candidate / reference, pair by pair; None where one is absent, not finite or 0."""
        return [finite_ratio(getattr(a, name), getattr(b, name)) for a, b in self.pairs]

    @property
    def apart_at_start(self) -> float | None:
        """How far the runs start from each other, by their headers; None where these don't tell, or of an excerpt."""
        return apart_at_start(self.reference.header, self.candidate.header) if self.step(0) == 1 else None

    @cached_property
    def passes(self) -> list[int]:
        """Passes of each window, from the side that isn't the torch reference."""
        of_candidate = self.candidate.header.engine != "torch"
        return [(b if of_candidate else a).passes or 0 for a, b in self.pairs]

    @cached_property
    def idle(self) -> list[int]:
        """Idle passes of each window, from the same side."""
        of_candidate = self.candidate.header.engine != "torch"
        return [(b if of_candidate else a).idle_passes or 0 for a, b in self.pairs]


def _both_idle(a: StepRecord, b: StepRecord) -> bool:
    """Whether no gradient moved the weights in a step: it was skipped, or of no length, or at a rate of 0."""
    at_rest = bool(a.lr and b.lr) and not any((*(a.lr or ()), *(b.lr or ())))
    return bool(a.skipped and b.skipped) or a.grad_norm == b.grad_norm == 0 or at_rest
