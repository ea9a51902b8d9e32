"""Logs of every third step, of losses that are a step late, of windows in another order: what is said is true."""

from dataclasses import replace

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Header, StepRecord, Trace
from ds_parity.trace.digits import Precision
from ds_parity.trace.foreign import read_any

STEPS = 12
OF_TRAINING = {"data", "loss", "gradient", "clipping", "optimizer settings", "schedule", "weights"}
ROLLOUTS = (13, 18, 7, 10, 16, 10, 14, 8, 14, 9, 12, 11)


def constant(step):
    return 0.05


def run(*, momentum=0.0, clip=np.inf, start=0.0, norms=1.0, order=range(STEPS), counted=False, rate=constant):
    """A regression by SGD in fp64: its steps as records, with counts where it is `counted`."""
    draw = np.random.default_rng(5)
    wanted, weights, moving = draw.normal(size=8), np.full(8, start), np.zeros(8)
    batches = [draw.normal(size=(30, 8)) for _ in range(STEPS)]
    steps = []
    for step, at in enumerate(order, start=1):
        off = batches[at] @ (weights - wanted)
        gradient = 2 * batches[at].T @ off / 30
        norm = float(np.linalg.norm(gradient))
        moving = momentum * moving + gradient * min(1.0, clip / norm)
        weights = weights - rate(step) * moving
        told = {"passes": 2, "idle_passes": 0, "rollouts": ROLLOUTS[at], "prompts": 2}
        told |= {"tokens": 40 * ROLLOUTS[at], "total": 40.0 * ROLLOUTS[at]}
        figures = {"loss": float((off**2).mean()), "grad_norm": norms * norm, "lr": (rate(step),)}
        steps.append(StepRecord(step=step, **(told if counted else dict.fromkeys(told)), **figures))
    return steps


def traced(steps, ranks=None):
    told = {"scenario": "toy", "seed": 1, "versions": {}, "device": "cpu", "config_hash": "a", "engine": "loop"}
    return Trace(Header(**told, dtype="fp32", optimizer="SGD", ranks=ranks), tuple(steps))


def found(one, other):
    return diagnose(one, other, compare(one, other, Tier.REASSOCIATED, "fp32"))


@pytest.mark.parametrize("fault", [{"momentum": 0.5}, {"clip": 0.5}, {"start": 0.1}])
@pytest.mark.parametrize("chosen", [slice(2, None, 3), slice(5, None)], ids=["every third step", "from the sixth on"])
def test_a_step_that_is_in_no_record_may_differ_in_anything(fault, chosen):
    told = found(traced(run()[chosen]), traced(run(**fault)[chosen]))
    assert not told.causes
    assert set(told.classes) >= OF_TRAINING


def test_steps_that_are_all_recorded_exclude_what_comes_behind_the_first_difference():
    """The weights may be other ones from the start: without a header's `start` nothing shows them."""
    told = found(traced(run()), traced(run(momentum=0.5)))
    assert "data" in told.classes
    one, other = run(), run()
    other[0] = other[0].model_copy(update={"loss": 2 * other[0].loss})
    assert "schedule" not in found(traced(one), traced(other)).classes


def late(steps):
    """Steps whose loss is that of the step before."""
    return [it.model_copy(update={"loss": steps[max(0, at - 1)].loss}) for at, it in enumerate(steps)]


def test_a_loss_that_is_logged_a_step_late_is_no_data_that_come_back():
    told = found(traced(run()), traced(late(run())))
    names = {cause.name for cause in told.causes}
    assert "reported-loss" in names
    assert "resume-repeats-data" not in names


def test_without_a_norm_both_are_named():
    one, other = ([it.model_copy(update={"grad_norm": None}) for it in steps] for steps in (run(), late(run())))
    told = found(traced(one), traced(other))
    assert {cause.name for cause in told.causes} == {"reported-loss", "resume-repeats-data"}


def test_windows_in_another_order_end_where_they_did():
    swapped = [0, 1, 2, 4, 3, *range(5, STEPS)]
    one, other = (traced(run(counted=True, order=order), ranks=2) for order in (range(STEPS), swapped))
    told = found(one, other)
    assert not told.causes
    assert "data" in told.classes


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", None])
def test_a_norm_that_is_off_alone_may_be_logged_so(optimizer):
    """SGD would show it in the losses, and others forget a factor."""
    sides = [traced(run(norms=times, counted=True), ranks=4) for times in (1.0, 4.0)]
    one, other = (replace(it, header=it.header.model_copy(update={"optimizer": optimizer})) for it in sides)
    assert {cause.name for cause in grouped(found(one, other).causes)[0]} == {"constant-factor", "reported-norm"}


def bare(steps, **changes):
    """Steps of which a log has loss and gradient norm, or what is given in their place."""
    kept = {"lr": None, **changes}
    return [
        it.model_copy(update={name: new(it) if callable(new) else new for name, new in kept.items()}) for it in steps
    ]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_loss_that_is_off_by_a_little_behind_the_first_step_may_be_of_other_weights(optimizer):
    """Of losses that move with the weights in a straight line, norms show little."""
    one = traced(bare(run()))
    other = traced(bare(run(), loss=lambda it: it.loss * (1 + 1e-3 * (it.step == 5))))
    one, other = (replace(it, header=it.header.model_copy(update={"optimizer": optimizer})) for it in (one, other))
    told = found(one, other)
    assert not told.causes
    assert {"weights", "optimizer settings", "schedule", "clipping", "logging"} <= set(told.classes)
    # From the first step on there are no other weights.
    other = traced(bare(run(), loss=lambda it: it.loss * (1 + 1e-3 * it.step**0.5)))
    assert {cause.name for cause in found(one, other).causes} >= {"reported-loss"}


def test_losses_that_come_back_are_no_data_that_do_where_norms_agree():
    shifted, behind = late(run()), late(run(momentum=0.5))
    fault = [*shifted[:8], *behind[8:]]
    other = bare(fault, grad_norm=lambda it: it.grad_norm * (1.3 if it.step > 8 else 1.0))
    names = {cause.name for cause in found(traced(bare(run())), traced(other)).causes}
    assert "resume-repeats-data" not in names


@pytest.mark.parametrize(("digits", "open_too"), [(4, True), (9, False)])
def test_a_loss_of_few_digits_may_have_other_weights_from_the_start(digits, open_too):
    """Other initial weights: the norm shows them at once, and the loss by less than its digits."""
    one, other = bare(run()), bare(run(), grad_norm=lambda it: 1.01 * it.grad_norm)
    rounded = [
        [it.model_copy(update={"loss": float(f"{it.loss:.{digits}g}")}) for it in steps] for steps in (one, other)
    ]
    precision = {"loss": Precision(significant=digits)}
    told = found(*(replace(traced(steps), precision=precision) for steps in rounded))
    assert ({"weights", "data"} <= {*told.classes}) is open_too, told


def test_a_small_loss_that_is_off_in_its_last_digit_may_have_other_weights_too():
    """Its bound is that of losses of one half."""
    one, other = (bare(run(), loss=lambda it, by=by: (6318 - by) / 1e5) for by in (0, 1))
    other = bare(other, loss=lambda it: it.loss, grad_norm=lambda it: 1.01 * it.grad_norm)
    precision = {"loss": Precision(significant=4)}
    told = found(*(replace(traced(steps), precision=precision) for steps in (one, other)))
    assert {"weights", "data"} <= {*told.classes}, told


def test_what_was_not_recorded_excludes_nothing():
    one, other = (bare(run(), loss=lambda it, by=by: it.loss * by, grad_norm=None) for by in (1.0, 1.2))
    assert "gradient" in found(traced(one), traced(other)).classes


def test_two_rates_that_are_one_prove_no_schedule_that_stands_still():
    rates = [0.01, 0.02, 0.01, 0.02]
    one, other = (
        bare(run()[:4], lr=lambda it, of=of: (of(it.step),)) for of in (lambda n: 0.01 * n, lambda n: rates[n - 1])
    )
    told = found(traced(one[1::2]), traced(other[1::2]))
    assert all(cause.likelihood <= 0.5 for cause in told.causes if cause.name == "no-scheduler")
    still = bare(run()[:4], lr=(0.01,))
    assert found(traced(one), traced(still)).causes[0].likelihood > 0.9


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gradient_that_is_too_long_has_no_mean_left_in(ranks):
    one, other = (traced(run(norms=times, counted=True), ranks=ranks) for times in (1.0, float(ranks)))
    assert "dp-mean-left-in" not in {cause.name for cause in found(one, other).causes}


def linear(total, steps, top=2e-5, warm=10):
    """The rates of a linear schedule with a warm-up."""
    return [top * (n / warm if n < warm else max(0.0, (total - n) / (total - warm))) for n in range(steps)]


def by_rates(rates):
    steps = run()
    return traced(
        [
            steps[0].model_copy(update={"step": n, "lr": (it,), "loss": None, "grad_norm": None})
            for n, it in enumerate(rates, 1)
        ]
    )


@pytest.mark.parametrize(
    ("total", "name"), [(80, "schedule-too-short"), (50, "schedule-too-short"), (150, "schedule-too-long")]
)
@pytest.mark.parametrize("every", [1, 5])
def test_a_straight_fall_at_another_pace_is_named_beside_another_lowest_rate(total, name, every):
    told = found(*(by_rates(linear(of, 48)[::every]) for of in (100, total)))
    assert name in {cause.name for cause in grouped(told.causes)[0]}, told.causes


def test_a_lowest_rate_below_zero_is_no_cause():
    told = found(by_rates(linear(100, 90)), by_rates([*linear(60, 59), *[0.0] * 31]))
    assert "another-lowest-lr" not in {cause.name for cause in told.causes}
    told = found(by_rates(linear(60, 59)), by_rates(linear(40, 39)))
    assert "another-lowest-lr" not in {cause.name for cause in told.causes}


def rated(steps, rate):
    return bare(steps, lr=lambda it: (rate(it.step),))


def falling(step):
    return 0.05 / step


TWO = {"ten times": lambda step: 10 * falling(step), "of the next step": lambda step: falling(step + 1)}


@pytest.mark.parametrize("logged", TWO)
def test_a_loss_and_a_rate_that_are_logged_wrong_are_no_schedule_where_norms_are_the_same(logged):
    one = rated(run(), falling)
    other = [it.model_copy(update={"loss": it.loss * (1.1 + 0.01 * it.step)}) for it in rated(run(), TWO[logged])]
    told = found(traced(one), traced(other))
    assert {cause.name for cause in told.causes} >= {"reported-lr"}, told
    assert all(cause.kind == "logging" for cause in told.causes), told


@pytest.mark.parametrize("logged", TWO)
@pytest.mark.parametrize("changed", ["loss", "grad_norm"])
def test_a_rate_may_be_logged_wrong_where_its_own_step_shows_another_fault(changed, logged):
    one = rated(run(), falling)
    behind = [it.model_copy(update={changed: getattr(it, changed) * 1.3}) for it in run(momentum=0.3)]
    told = found(traced(one), traced(rated(behind, TWO[logged])))
    first = {cause.name for cause in grouped(told.causes)[0]}
    assert "reported-lr" in first
    assert "logging" in told.classes
    # Without such a fault the rate is that which was used.
    alone = found(traced(run(rate=falling)), traced(run(rate=TWO[logged])))
    assert "reported-lr" not in {cause.name for cause in alone.causes}


@pytest.mark.parametrize("logged", TWO)
def test_a_rate_may_be_logged_wrong_where_the_next_step_agrees_and_momentum_shows_in_the_one_after_it(logged):
    """Of a log of the next step's rates, which some loops write, the first other rate is not used before step 2."""
    told = found(traced(rated(run(), falling)), traced(rated(run(momentum=0.3), TWO[logged])))
    assert "reported-lr" in {cause.name for cause in grouped(told.causes)[0]}
    assert "unless the log is of the rate that the next step uses" in told.causes[0].evidence


def first_group(rates, *, digits=None, every=1, passes=None):
    """The causes that are named first where a log of loss and rate has these rates, by side."""
    sides = []
    for of in rates:
        steps = [it.model_copy(update={"grad_norm": None, "passes": passes}) for it in rated(run(), of)]
        if of is not rates[0]:
            others = [it.lr[0] != rates[0](it.step) for it in steps]
            steps = [
                it.model_copy(update={"loss": it.loss * (1 + 0.01 * other)})
                for it, other in zip(steps, [False, *others], strict=False)
            ]
        if digits:
            steps = [it.model_copy(update={"lr": (float(f"{it.lr[0]:.{digits}g}"),)}) for it in steps]
        precision = {"lr": Precision(significant=digits)} if digits else {}
        sides.append(replace(traced(steps[every - 1 :: every]), precision=precision))
    causes = found(*sides).causes
    return {cause.name for cause in grouped(causes)[0]} if causes else set()


def warmed(highest, steps, lowest=0.0):
    """A warm-up of 3 steps, whose last rate may be off by an ulp, and a straight line to the lowest rate."""

    def rate(step):
        if step <= 3:
            return highest * step / 3
        return lowest + (highest - lowest) * (1 - (step - 4) / steps)

    return rate


@pytest.mark.parametrize("highest", [0.1, 0.3, 1e-5])
def test_a_schedule_for_more_steps_is_named_though_its_warm_up_ends_an_ulp_off(highest):
    named = first_group([warmed(highest, 11), warmed(highest, 25)])
    assert named >= {"schedule-too-long", "another-lowest-lr"}


@pytest.mark.parametrize("digits", [None, 7, 6])
def test_another_lowest_rate_is_named_beside_another_pace_in_few_digits_too(digits):
    named = first_group([warmed(0.3, 11), warmed(0.3, 11, lowest=0.002)], digits=digits)
    assert named >= {"schedule-too-long", "another-lowest-lr"}


def test_a_rate_that_holds_for_several_steps_shows_it_in_those_that_are_logged_alone():
    rates = [lambda step: 0.02 - 0.001 * step, lambda step: 0.02 - 0.001 * (step // 2)]
    assert {"schedule-too-long", "scheduler-per-outer-step"} <= first_group(rates, every=2)
    assert "schedule-too-long" not in first_group(rates)


@pytest.mark.parametrize("passes", [None, 1, 4])
def test_a_rate_that_stands_still_may_have_come_to_its_end_in_steps_that_are_in_no_log(passes):
    rates = [lambda step: 0.02 * (1 - step / 12), lambda step: 0.0]
    named = first_group(rates, every=3, passes=passes)
    assert {"no-scheduler", "scheduler-stepped-often", "schedule-too-short"} <= named
    assert ("scheduler-per-pass" in named) is (passes != 1)
    assert "schedule-too-short" not in first_group(rates, passes=passes)


@pytest.mark.parametrize("norms", [True, False])
def test_a_loss_that_is_logged_late_beside_another_fault_is_no_data_that_come_back(norms):
    one, other = bare(run()), bare(late(run(momentum=0.03)))
    if not norms:
        one, other = (bare(steps, grad_norm=None) for steps in (one, other))
    names = {cause.name for cause in found(traced(one), traced(other)).causes}
    assert "resume-repeats-data" not in names or {"reported-loss", "resume-repeats-data"} <= names
    assert norms is ("resume-repeats-data" not in names)


def test_passes_that_are_as_many_as_the_ranks_leave_open_that_a_scheduler_steps_once_a_rank():
    def steps(times):
        return [
            it.model_copy(update={"passes": 4, "lr": (0.05 - 0.0005 * (times * (it.step - 1)),), "grad_norm": None})
            for it in run(counted=True)
        ]

    for ranks in (4, 8):
        told = found(traced(steps(1), ranks=ranks), traced(steps(4), ranks=ranks))
        first = {cause.name for cause in grouped(told.causes)[0]}
        assert "scheduler-per-pass" in first
        assert ("scheduler-stepped-often" in first) is (ranks == 4)


def test_a_mean_over_all_steps_that_alone_differs_has_no_first_step(tmp_path):
    """Norms that four decimals round alike, in a record with a loss that is not above 0."""
    traces = []
    for off in (0.0, 0.0001):
        rows = (f"{n},{-0.1 * n:.4f},0.0001,{0.5 + 0.01 * n + off:.4f}" for n in range(1, 7))
        path = tmp_path / f"{off}.csv"
        path.write_text("\n".join(["step,loss,lr,grad_norm", *rows]) + "\n")
        traces.append(read_any(path))
    comparison = compare(*traces, Tier.REASSOCIATED)
    assert not comparison.equal
    assert {"gradient", "logging"} <= set(diagnose(*traces, comparison).classes)
