"""A cause is named where it predicts the record; otherwise it is said what is certain, and what is left open."""

import math
import re
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import CLASSES, Cause, Fit, diagnose, grouped, kind_of
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.subjects.controls.known import WITHOUT_TRACE, known
from ds_parity.trace import Header, Hypothesis, StepRecord, Trace, Weights
from ds_parity.trace.foreign import open_pair

ROLLOUTS = (13, 14, 13, 8, 12, 7)
LR = (0.025, 0.0275, 0.03, 0.0325, 0.035, 0.0375)
NORMS = (0.9, 0.7, 1.4, 0.8, 1.1, 0.6)


def weights(number, apart=0.0):
    """Weights that every step moves by one in the first of 16 directions, and `apart` in the second."""
    sketch = (float(number), apart, *[1.0] * 14)
    return Weights(checksum=sha256(repr(sketch).encode()).hexdigest(), norm=1000.0, sketch=sketch)


def step(number, **changed):
    at = number - 1
    figures = {
        "passes": 4,
        "idle_passes": 2 + at % 2,
        "rollouts": ROLLOUTS[at],
        "prompts": 3,
        "tokens": 100 * ROLLOUTS[at],
        "total": 100.0 * ROLLOUTS[at],
        "loss": 0.5 + at,
        "lr": (LR[at],),
        "grad_norm": NORMS[at],
        "weights": weights(number),
        "metrics": {"reward": 0.25 * (at % 3)},
    }
    return StepRecord(step=number, **{**figures, **changed})


def trace(change=lambda number: {}, steps=6, engine="ds_parity", ranks=2, seed=1):
    header = Header(scenario="toy", seed=seed, versions={}, device="cpu", ranks=ranks, config_hash="ab", engine=engine)
    return Trace(header, tuple(step(number, **change(number)) for number in range(1, steps + 1)))


def diagnosed(change, *, reference=lambda number: {}, **options):
    ranks = options.get("ranks", 2)
    a, b = trace(reference, engine="torch", ranks=1), trace(change, **options)
    assert b.header.ranks == ranks
    return diagnose(a, b, compare(a, b, Tier.REASSOCIATED))


def causes(change, **options):
    return diagnosed(change, **options).causes


def trained(change):
    """The change, and other weights from the first step on that has one."""

    def changed(number):
        first = next((n for n in range(1, number + 1) if change(n)), None)
        if first is None:
            return change(number)
        # The loss of other weights is another one.
        loss = {"loss": step(number).loss * (1 + 1e-9)} if number > first else {}
        return {**loss, "weights": weights(number, number - first + 1.0), **change(number)}

    return changed


def off(factor):
    """The gradient norm off by a factor, and the weights from the first step on in which it is."""
    return trained(lambda n: {"grad_norm": NORMS[n - 1] * factor(n)} if factor(n) != 1.0 else {})


def total(number):
    return 100.0 * ROLLOUTS[number - 1]


def scaled(factor, **others):
    """Loss and gradient norm off by a factor, and what else a step says."""

    def changed(number):
        found = {"loss": (0.5 + number - 1) * factor(number), "grad_norm": NORMS[number - 1] * factor(number)}
        found |= {"weights": weights(number, float(number))}
        return found | {name: value(number) for name, value in others.items()}

    return changed


def held(*rollouts, passes=None):
    return lambda n: {
        "rollouts": rollouts[n - 1],
        "passes": passes[n - 1] if passes else 4,
        **(
            {"grad_norm": 0.3, "loss": 9.0, "tokens": 1, "weights": weights(n, 1.0)}
            if rollouts[:n] != ROLLOUTS[:n]
            else {}
        ),
    }


def divided(number):
    """What a reference says whose losses are divided already."""
    return {"total": 2.0}


def weighed(number):
    """What a reference says whose micro-batches bring weights."""
    return {"total": 3.25 + number}


TOKENS = (900, 1500, 700, 800, 1700, 300)
MEANS = ((0.3, 0.9, -0.2, 0.7, 0.5, 1.1), (0.8, 0.2, 0.6, 0.1, 0.9, 0.4))


def of_terms(policy=lambda n: 1.0, kl=lambda n: 1.0):
    """What a step of two terms says of which each has entered the loss by a factor: kl has the coefficient 0.5."""

    def changed(number):
        means = [column[number - 1] for column in MEANS]
        metrics = {"reward": 0.25 * (number % 3), "policy": means[0], "kl": means[1]}
        factors = policy(number), kl(number)
        found = {"metrics": metrics, "total": 1.0, "tokens": TOKENS[number - 1]}
        found["loss"] = means[0] * factors[0] + 0.5 * means[1] * factors[1]
        if any(f != 1.0 for n in range(1, number + 1) for f in (policy(n), kl(n))):
            found["grad_norm"] = NORMS[number - 1] * (factors[0] + factors[1]) / 1.7
            found["weights"] = Weights(checksum="b" * 64, norm=20.0 + number)
        return found

    return changed


def idle_at_odd(number):
    """No update where ranks idle, which is in every second step."""
    lost = trained(lambda n: {"grad_norm": None, "skipped": True} if n % 2 else {})
    return {"idle_passes": number % 2, **lost(number)}


def over_tokens(number):
    return ROLLOUTS[number - 1] / TOKENS[number - 1]


def over_the_last(number):
    return TOKENS[number - 1] / TOKENS[number - 2] if number > 1 else 1.0


CASES = {
    "term-by-another": (of_terms(kl=over_tokens), {"reference": of_terms()}),
    "term-of-last-window": (of_terms(policy=over_the_last), {"reference": of_terms()}),
    "dp-mean-left-in": (off(lambda n: 0.5), {}),
    "gas-scaled-twice": (off(lambda n: 0.25), {}),
    "sp-factor-by-stage": (off(lambda n: 2.0), {"ranks": 1}),
    "constant-factor": (off(lambda n: 0.37), {}),
    "divided-already": (scaled(lambda n: 1 / total(n)), {}),
    "sum-over-ranks": (scaled(lambda n: 2.0, total=lambda n: 1.0), {"reference": divided}),
    "weight-left-out": (scaled(lambda n: 0.8 + n / 9, total=lambda n: 4.5), {"reference": weighed}),
    "idle-counted": (off(lambda n: total(n) / (total(n) + 70 * (2 + (n - 1) % 2))), {}),
    "target-not-actual": (off(lambda n: total(n) / 1200), {}),
    "wrong-window": (off(lambda n: 1.0 if n == 1 else total(n) / total(n - 1)), {}),
    "idle-nan": (idle_at_odd, {}),
    "scheduler-per-pass": (trained(lambda n: {"lr": (0.0325 + 0.01 * (n - 1),)}), {}),
    "scheduler-stepped-often": (trained(lambda n: {"lr": (0.025 + 0.0075 * (n - 1),)} if n > 1 else {}), {}),
    "no-scheduler": (trained(lambda n: {"lr": (0.05,)}), {}),
    "lr-rounded": (trained(lambda n: {"lr": (round(LR[n - 1], 3),)} if round(LR[n - 1], 3) != LR[n - 1] else {}), {}),
    "schedule-off-by-steps": (trained(lambda n: {"lr": ((*LR, 0.04)[n],)}), {}),
    "base-lr": (trained(lambda n: {"lr": (LR[n - 1] * 1.5,)}), {}),
    "group-lr": (
        trained(lambda n: {"lr": (LR[n - 1], 2 * LR[n - 1])}),
        {"reference": lambda n: {"lr": (LR[n - 1], LR[n - 1])}},
    ),
    "scheduler-budget-in-passes": (trained(lambda n: {"lr": (0.025 + 0.0025 / 4 * (n - 1),)} if n > 1 else {}), {}),
    "schedule-too-long": (trained(lambda n: {"lr": (0.025 + 0.0025 / 3 * (n - 1),)} if n > 1 else {}), {}),
    "scheduler-per-outer-step": (trained(lambda n: {"lr": (0.025 + 0.0025 * ((n - 1) // 2),)} if n > 1 else {}), {}),
    "resume-resets-schedule": (trained(lambda n: {"lr": (LR[n - 4],)} if n > 3 else {}), {}),
    "lr-reported-a-step-off": (lambda n: {"lr": ((*LR, 0.04)[n],)}, {}),
    "reported-lr": (lambda n: {"lr": (0.5,)}, {}),
    "returned-loss-scaled": (lambda n: {"loss": (0.5 + n - 1) / 4}, {}),
    "reported-loss": (lambda n: {"loss": (0.6, 1.2, 2.9, 3.1, 4.4, 5.6)[n - 1]}, {}),
    "reported-norm": (lambda n: {"grad_norm": NORMS[n - 1] ** 2}, {}),
    "reported-counts": (lambda n: {"tokens": 7}, {}),
    "nan-in-metric-reduce": (lambda n: {"metrics": {"reward": math.nan}}, {}),
    "reported-metric": (lambda n: {"metrics": {"reward": 0.3 * (n % 3)}}, {}),
    "data-or-seed": (trained(lambda n: {"loss": 7.0 * n, "grad_norm": 3.0 / n}), {"seed": 2}),
    "partial-window-leak": (lambda n: {}, {"steps": 5}),
    "boundary-off-by-one": (
        held(2, 12, 12, 12, 12, 12, passes=(1, 4, 4, 4, 4, 4)),
        {"reference": lambda n: {"rollouts": 12}},
    ),
    "boundary-a-pass-late": (
        held(15, 12, 12, 12, 12, 9, passes=(5, 4, 4, 4, 4, 3)),
        {"reference": lambda n: {"rollouts": 12}},
    ),
    "equality-boundary": (held(48, 12, 7, passes=(15, 4, 2)), {"steps": 3}),
    "local-count": (held(27, 21, 19), {"steps": 3}),
    "counter-drift": (held(13, 14, 10, 11, 14, 5), {}),
    "resume-resets-window": (held(13, 14, 13, 11, 12, 4, passes=(4, 4, 4, 3, 4, 1)), {}),
    "resume-repeats-data": (
        trained(
            lambda n: (
                {"loss": 0.52 + n - 4, "grad_norm": NORMS[n - 4], "tokens": 100 * ROLLOUTS[n - 4]} if n > 3 else {}
            )
        ),
        {},
    ),
    "silent-truncation": (held(12, 12, 12, 8, 12, 6, passes=(4, 5, 4, 3, 4, 3)), {}),
}
OF_NORMS = {"loss", "gradient", "clipping", "optimizer settings"}
# What leaves no number of its own: the classes that are left open, and known faults among what is not excluded.
UNKNOWN = {
    "running-total": (off(lambda n: (1.9, 2.7, 3.2, 1.5, 1.4, 2.0)[n - 1]), OF_NORMS),
    "last-backward-only": (off(lambda n: (0.5, 0.9, 0.8, 1.1, 0.6, 0.7)[n - 1]), OF_NORMS),
    "mean-of-micro-batches": (off(lambda n: (1.02, 0.9, 1.4, 0.9, 1.2, 1.1)[n - 1]), OF_NORMS),
    "sticky-boundary": (off(lambda n: (1.0, 0.9, 1.2, 1.01, 0.75, 0.9)[n - 1]), OF_NORMS | {"weights"}),
    "mid-window-checkpoint": (off(lambda n: (1.0, 0.9, 1.001, 1.002, 0.999, 1.001)[n - 1]), OF_NORMS | {"weights"}),
    # Without a header's start the weights may have been other ones.
    "mixed-weights": (
        trained(lambda n: {"loss": 0.1 * n * n, "grad_norm": 3.0 / n}),
        {"data", "loss", "gradient", "weights"},
    ),
    "implicit-clip": (
        lambda n: {"weights": weights(n, 1.0), "loss": step(n).loss * (1 + 1e-9 * (n > 3))} if n > 2 else {},
        {"gradient", "clipping", "optimizer settings", "weights"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_the_fault_that_was_put_in(name):
    change, options = CASES[name]
    found = causes(change, **options)
    assert found, "a difference without a cause"
    assert name in {cause.name for cause in grouped(found)[0]}, [(cause.name, cause.evidence) for cause in found]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda n: {"loss": (0.5 + n - 1) * (1 + 2e-5)}, "is 1.00002 times the reference's in every step"),
        (trained(lambda n: {"lr": (LR[n - 1] * (1 + 1e-9),)}), "the LR is 1.000000001 times the reference's"),
    ],
)
def test_a_cause_tells_what_is_other(change, says):
    """A factor that rounds to 1, or the factor of what isn't there, explains nothing."""
    found = causes(change)
    assert says in found[0].evidence
    assert "lr-rounded" not in {cause.name for cause in found}


PASSES = (2, 1, 2, 2, 1, 3)


def of_passes(loss):
    """The logged loss of each step by the right one and the passes of its window, of which each has others."""
    return lambda n: {"passes": PASSES[n - 1], "loss": loss(0.5 + n - 1, PASSES[n - 1])}


def test_a_loss_is_divided_by_the_passes_of_its_own_window():
    (cause,) = causes(of_passes(lambda loss, passes: loss / passes))
    assert (cause.name, cause.fit) == ("returned-loss-scaled", Fit.EVERY_STEP)
    assert "divided by the passes of its window (2, 1, 2, 2, 1, ...)" in cause.evidence


@pytest.mark.parametrize("loss", [lambda loss, passes: loss / 2, lambda loss, passes: loss / (passes + 0.01)])
def test_a_loss_that_is_not_divided_by_the_passes_of_each_window_is_logged_otherwise(loss):
    names = {cause.name for cause in causes(of_passes(loss))}
    assert "reported-loss" in names
    assert "returned-loss-scaled" not in names


def test_passes_of_the_reference_tell_where_a_log_holds_none(tmp_path):
    """A log of other people's writes no passes down, and a loss in four decimals."""
    bare = lambda n: {"passes": PASSES[n - 1], "weights": None, "grad_norm": NORMS[n - 1] / 7}  # noqa: E731
    reference = trace(bare, engine="loop")
    path = tmp_path / "log.csv"
    rows = [f"{it.step},{it.loss / it.passes:.4f},{it.lr[0]!r},{it.grad_norm!r}" for it in reference.steps]
    path.write_text("\n".join(["step,loss,lr,grad_norm", *rows]) + "\n")
    lines = [it.model_dump_json() for it in (reference.header, *reference.steps)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines) + "\n")
    one, other = open_pair(tmp_path / "own.jsonl", path)
    (cause,) = diagnose(one, other, compare(one, other, Tier.REASSOCIATED)).causes
    assert cause.name == "returned-loss-scaled"


@pytest.mark.parametrize("decimals", [4, 17])
@pytest.mark.parametrize(
    ("divisors", "named"), [(PASSES, True), ([4] * 6, True), ([1.5] * 6, False), ((2, 1, 2.4, 2, 1, 3), False)]
)
def test_passes_that_no_log_holds_may_be_the_whole_numbers_that_divide_losses(tmp_path, decimals, divisors, named):
    """Other wrong logs leave such losses, too."""
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    for path, of in zip(paths, ([1] * 6, divisors), strict=True):
        rows = [f"{n},{(0.5 + n / 7) / of[n - 1]:.{decimals}f},{LR[n - 1]!r},{NORMS[n - 1] / 7!r}" for n in range(1, 7)]
        path.write_text("\n".join(["step,loss,lr,grad_norm", *rows]) + "\n")
    one, other = open_pair(*paths)
    (group,) = grouped(diagnose(one, other, compare(one, other, Tier.REASSOCIATED)).causes)
    names = {cause.name for cause in group}
    assert "reported-loss" in names
    assert ("returned-loss-scaled" in names) is named


@pytest.mark.parametrize(
    ("logged", "said"),
    [
        ("", "no loss is logged"),
        *((text, "a loss that is not finite, or none, is logged") for text in ("nan", "inf", "-inf")),
    ],
)
def test_a_loss_that_is_not_logged_once_or_is_no_number_has_one_cause(tmp_path, logged, said):
    lines = [f"{step},{2 + step / 10},{step / 1e4},{0.5 + step / 50}" for step in range(1, 21)]
    lost = [line.replace("2.5,", f"{logged},") if line.startswith("5,") else line for line in lines]
    paths = tmp_path / "a.csv", tmp_path / "b.csv"
    for path, rows in zip(paths, (lines, lost), strict=True):
        path.write_text("\n".join(["step,loss,lr,grad_norm", *rows]) + "\n")
    one, other = open_pair(*paths)
    (cause,) = diagnose(one, other, compare(one, other, Tier.REASSOCIATED)).causes
    assert (cause.name, cause.evidence.partition(";")[0]) == (
        "reported-loss",
        f"{said} in step 5, where the reference has one",
    )


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_fault_without_a_number_of_its_own_is_unknown_with_what_is_certain(name):
    change, classes = UNKNOWN[name]
    found = diagnosed(change)
    assert found.causes == ()
    assert set(found.classes) == classes
    assert name in found.not_excluded
    assert found.certain[0].startswith("first to differ, in step ")
    assert any(one.startswith("agree in every common step: ") for one in found.certain)
    assert "ds-parity " in found.next


@pytest.mark.parametrize("name", CASES)
def test_a_cause_belongs_to_a_class_that_the_record_leaves_open(name):
    change, options = CASES[name]
    found = diagnosed(change, **options)
    assert {cause.kind for cause in grouped(found.causes)[0]} & set(found.classes), found


@pytest.mark.parametrize(
    "change",
    [
        of_terms(kl=lambda n: 0.5 + n / 9),  # a factor that is no ratio of counts
        of_terms(policy=over_the_last, kl=over_tokens),  # two faults at once
        lambda n: {**of_terms()(n), "loss": 9.0 / n, "grad_norm": 3.0 / n},
        lambda n: {**of_terms()(n), "loss": of_terms(kl=over_tokens)(n)["loss"]},  # only the log is off
    ],
)
def test_no_term_is_blamed_where_its_factor_is_no_ratio_of_counts(change):
    names = [cause.name for cause in causes(change, reference=of_terms())]
    assert not {"term-by-another", "term-of-last-window"} & set(names), names


def test_a_factor_that_is_the_same_in_all_steps_may_be_a_coefficient():
    """Windows of 8 rollouts of 4 prompts: twice the coefficient looks like a mean over prompts."""

    def even(changed):
        return lambda n: {**changed(n), "rollouts": 8, "prompts": 4}

    found = causes(even(of_terms(kl=lambda n: 2.0)), reference=even(of_terms()))
    blamed = [cause for cause in found if cause.name == "term-by-another"]
    assert all(cause.fit is Fit.CONSTANT and "coefficient" in cause.evidence for cause in blamed), blamed


def test_no_term_is_blamed_where_the_metrics_are_no_terms_of_the_loss():
    found = causes(scaled(over_tokens))
    assert not {"term-by-another", "term-of-last-window"} & {cause.name for cause in found}


def test_a_norm_that_is_divided_twice_is_named_where_the_loss_is_reported_right():
    found = causes(off(lambda n: 1 / total(n)))
    assert found[0].name == "divided-already", found


def test_a_loss_that_was_divided_by_each_ranks_share_is_named_too():
    found = causes(scaled(lambda n: 2 / total(n)))
    assert found[0].name == "divided-already", found


def test_another_total_of_the_same_data_is_no_missing_weight_where_tokens_or_rollouts_weigh():
    found = causes(scaled(lambda n: 0.8, total=lambda n: 4.5), reference=lambda n: {"total": float(ROLLOUTS[n - 1])})
    assert "weight-left-out" not in [cause.name for cause in found]


def with_a_trainer(number):
    """A reference that divides in a trainer's place, and says what that would have made of its loss."""
    shared = Hypothesis(loss=0.7 + number - 1, grad_norm=None, along=None)
    return {"hypotheses": {"divided-by-trainer": shared}}


def of_the_trainer(loss):
    return lambda n: {
        "loss": loss + n - 1,
        "grad_norm": 1.1 * NORMS[n - 1],
        "weights": weights(n, float(n)),
        "total": 2.0,
    }


def test_a_trainers_own_division_is_named_by_the_loss_that_it_makes():
    found = causes(of_the_trainer(0.7), reference=with_a_trainer)
    assert found[0].name == "divided-by-trainer"
    assert "predicted 0.7, by the step's own total 0.5" in found[0].evidence
    assert "normalise" in found[0].remedy
    assert found[0].kind == "gradient"


@pytest.mark.parametrize("loss", [0.69, 0.71, 0.9])
def test_another_loss_is_not_that_of_the_trainer(loss):
    found = causes(of_the_trainer(loss), reference=with_a_trainer)
    assert "divided-by-trainer" not in {cause.name for cause in found}


def test_what_a_trainer_would_have_made_of_a_loss_excludes_no_other_fault():
    """It says nothing of gradients: it is no reference that has computed what known faults come to."""
    change, _ = UNKNOWN["mean-of-micro-batches"]
    assert "mean-of-micro-batches" in diagnosed(change, reference=with_a_trainer).not_excluded


SHORT_AT_THE_END_OF_EPOCHS = (8, 8, 4, 8, 8, 4)


def of_epochs(number):
    """A reference whose second window in a row is followed by a short one, in which an epoch ends."""
    rollouts = SHORT_AT_THE_END_OF_EPOCHS[number - 1]
    return {"rollouts": rollouts, "passes": rollouts // 2}


@pytest.mark.parametrize("told", [True, False])
def test_windows_that_go_on_past_the_end_of_an_epoch_are_no_resume(told):
    """The windows of the candidate are all alike, and those of the reference never had a surplus to forget."""

    def changed(number):
        told_of = {"grad_norm": 0.3, "loss": 9.0, "tokens": 1, "weights": weights(number, 1.0)} if number > 2 else {}
        return {"rollouts": 8, "passes": 4 if told else None, **told_of}

    found = causes(changed, reference=lambda n: of_epochs(n) | ({} if told else {"passes": None}), steps=5)
    assert {cause.name for cause in found} & {"resume-resets-window", "counter-drift"} == set()


IDLE = (4, 3, 5, 4, 3, 3)


def ended_early(*rollouts, passes=4, before=0):
    """A run without its last step, whose windows hold so many rollouts; `before`: steps before those of the trace."""
    each = passes if isinstance(passes, tuple) else (passes,) * len(rollouts)

    def windows(number):
        return {"rollouts": rollouts[number - 1], "passes": each[number - 1], "idle_passes": IDLE[number - 1]}

    whole, cut = trace(windows, steps=len(rollouts)), trace(windows, steps=len(rollouts) - 1)
    a, b = (
        Trace(one.header, tuple(it.model_copy(update={"step": it.step + before}) for it in one.steps))
        for one in (whole, cut)
    )
    return diagnose(a, b, compare(a, b, Tier.EXACT))


@pytest.mark.parametrize("before", [0, 40])
@pytest.mark.parametrize(
    ("rollouts", "passes"),
    [
        ((16, 16, 16, 16), 4),
        ((16, 16, 16, 20), 4),
        ((14, 13, 13, 14), 4),  # the last window is as long as others
        ((13, 14, 13, 8), (4, 4, 5, 3)),  # a target of 12, and a surplus that is carried on: 48 are four of them
        ((14, 15, 13, 12), 4),  # a target of 12, and windows that each count anew
        ((13, 14, 13, 8), None),
        ((16, 10), 4),  # a target of 10, and a pass of 8
    ],
)
def test_a_run_that_ends_a_whole_window_early_has_lost_no_tail(rollouts, passes, before):
    found = ended_early(*rollouts, passes=passes, before=before)
    assert found.causes == ()
    assert {"data", "gradient", "logging"} <= set(found.classes), "what cuts a trace short may cut the log alone"
    end = len(rollouts) - 1 + before
    said = f"the candidate ends with step {end}, where step {end + 1} of {rollouts[-1]} rollouts was due"
    assert said in found.certain


@pytest.mark.parametrize("before", [0, 40])
@pytest.mark.parametrize(
    ("rollouts", "passes"),
    [
        ((16, 16, 16, 15), 4),
        ((16, 16, 16, 15), None),
        ((13, 14, 13, 8, 7), (4, 4, 5, 3, 3)),
        ((13, 14, 13, 8, 12, 7), 4),
        ((14, 15, 13, 1), None),
    ],
)
def test_a_window_that_is_too_short_for_any_target_is_a_lost_tail(rollouts, passes, before):
    found = ended_early(*rollouts, passes=passes, before=before)
    assert {cause.name for cause in found.causes} == {"partial-window-leak", "indivisible-batch"}
    assert "too few for a whole window" in found.causes[0].evidence


def test_a_run_that_ends_several_steps_early_says_where():
    found = diagnosed(lambda n: {}, steps=3)
    assert found.causes == ()
    assert "the candidate ends with step 3, where step 4 of 8 rollouts was due" in found.certain
    assert "logging" in found.classes


def test_a_window_that_is_counted_anew_is_seen_only_where_passes_are_known():
    counted = held(13, 14, 13, 11, 12, 4, passes=(None,) * 6)
    assert "resume-resets-window" not in {cause.name for cause in causes(counted)}


def test_windows_are_not_said_to_have_so_many_passes_where_these_are_not_known():
    """Nor is a first window of one pass taken for rollouts that were dropped."""
    found = causes(held(13, 14, 10, 11, 14, 5, passes=(None,) * 6))
    assert all("passes" not in cause.evidence for cause in found), found


def test_a_schedule_that_moves_on_a_skipped_step_is_named():
    def skipped(n):
        return {"skipped": True, "grad_norm": None, "loss": None, "total": 0.0} if n == 2 else {}

    def behind(n):
        return {**skipped(n), "lr": (LR[n - 1 - (n > 2)],)}

    ahead = trained(lambda n: {"lr": (LR[n - 1],)} if n > 2 else {})
    found = causes(lambda n: {**skipped(n), **ahead(n)}, reference=behind)
    assert found[0].name == "scheduler-on-skipped-step"


def test_an_lr_that_is_told_a_step_late_is_named_and_one_that_trains_so_is_not():
    """The step before's, from the second step on."""

    def late(n):
        return {"lr": (LR[max(n - 2, 0)],)}

    assert causes(late)[0].name == "lr-reported-a-step-off"
    found = causes(trained(lambda n: late(n) if n > 1 else {}))
    assert found
    assert "lr-reported-a-step-off" not in [cause.name for cause in found]


def test_an_lr_is_told_off_by_a_step_only_as_surely_as_what_was_compared_shows():
    """A real shift moves weights at once; where they were not recorded, the record fits both."""

    def told(n):
        return {"lr": ((*LR, 0.04)[n],)}

    for absent in (("weights",), ("weights", "grad_norm"), ("weights", "grad_norm", "loss")):
        found = causes(
            lambda n, absent=absent: {**told(n), **dict.fromkeys(absent)},
            reference=lambda n, absent=absent: dict.fromkeys(absent),
        )
        names = {cause.name for cause in grouped(found)[0]}
        assert "schedule-off-by-steps" in names, absent
        assert ("lr-reported-a-step-off" in names) == (len(absent) < 3), absent
        agree = found[0].evidence.partition(");")[2]
        assert all(field not in agree for field in absent), found[0].evidence


# Before an excerpt both sides may have consumed any number of rollouts.
@pytest.mark.parametrize("name", [name for name in CASES if name != "silent-truncation"])
def test_causes_name_steps_by_their_number_also_where_a_trace_begins_later(name):
    def renumbered(held):
        return Trace(held.header, tuple(record.model_copy(update={"step": record.step + 40}) for record in held.steps))

    change, options = CASES[name][0], dict(CASES[name][1])
    reference = options.pop("reference", lambda number: {})
    a, b = renumbered(trace(reference, engine="torch", ranks=1)), renumbered(trace(change, **options))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    assert name in {cause.name for cause in grouped(found)[0]}
    named = [int(n) for cause in found for n in re.findall(r"\bsteps? \[?(\d+)", cause.evidence)]
    named += [int(n) for cause in found for n in re.findall(r"\bsteps \d+ to (\d+)", cause.evidence)]
    assert all(number > 40 for number in named), [cause.evidence for cause in found]


def test_what_a_foreign_trace_does_not_say_is_not_told():
    """It knows of no passes."""
    unknown = dict.fromkeys(("passes", "idle_passes"))
    late = trained(lambda n: {"lr": (0.0325 + 0.01 * (n - 1),)})
    found = causes(lambda n: {**unknown, **late(n)}, reference=lambda n: unknown)
    assert {"scheduler-stepped-often", "scheduler-per-pass"} <= {one.name for one in grouped(found)[0]}
    assert "windows have" not in found[0].evidence


def test_a_second_division_by_what_a_foreign_loop_does_not_record_may_be_deepspeeds():
    """Both predict 1 / 64 in every step: the total, and gradient_accumulation_steps, which no trace has."""
    unknown = dict.fromkeys(("passes", "idle_passes"))
    counted = {"rollouts": 64, "total": 64.0}
    twice = off(lambda n: 1 / 64)
    found = causes(lambda n: {**unknown, **counted, **twice(n)}, reference=lambda n: counted)
    assert {"gas-scaled-twice", "divided-already"} <= {one.name for one in grouped(found)[0]}
    known = causes(lambda n: {**counted, **twice(n)}, reference=lambda n: counted)
    assert "gas-scaled-twice" not in {one.name for one in grouped(known)[0]}, "4 passes"


def test_rollouts_and_tokens_that_were_not_recorded_are_not_said_to_agree():
    """Another loss in a trace that tells of no counts."""
    unknown = dict.fromkeys(("passes", "idle_passes", "rollouts", "prompts", "tokens", "total", "weights"))
    found = diagnosed(lambda n: {**unknown, "loss": 9.0 / n, "grad_norm": 3.0}, reference=lambda n: unknown)
    agree = [one for one in found.certain if one.startswith("agree")]
    assert agree
    assert not any(name in one for one in agree for name in ("rollouts", "tokens", "weights"))
    assert any(one.startswith("not recorded") and "rollouts, tokens" in one for one in found.certain)
    assert "record" in found.next


def test_a_target_is_not_made_of_a_total_that_is_not_known():
    """Norms off by one number in all steps, where no total was recorded, or where the first norm is 0."""
    for unknown in ({"total": None}, {"total": 0.0}):
        found = causes(lambda n, u=unknown: {**u, **off(lambda n: 0.5)(n)}, reference=lambda n, u=unknown: u)
        assert "target-not-actual" not in {cause.name for cause in found}
    found = causes(off(lambda n: 0.0))
    assert not {"target-not-actual", "constant-factor"} & {cause.name for cause in found}
    assert not any("/ 0" in cause.evidence for cause in found)


def test_a_step_without_a_norm_does_not_end_the_search_for_a_factor():
    found = causes(lambda n: {**off(lambda n: 0.37)(n), **({"grad_norm": None, "skipped": True} if n == 3 else {})})
    assert "constant-factor" in {cause.name for cause in found}


def nan_from(first, **others):
    """One NaN in the weights, and NaN from then on."""
    lost = {"loss": math.nan, "grad_norm": math.nan, "weights": None}
    return lambda n: {"idle_passes": 2 * (n == 3), **({} if n < first else lost if n > first else {**lost, **others})}


def idle_at_three(number):
    return {"idle_passes": 2 * (number == 3)}


def test_a_rate_that_is_one_nan_on_both_sides_is_a_difference():
    """The very same object, which two lists hold for equal."""
    found = diagnosed(
        lambda n: {"lr": (math.nan,)} if n == 3 else {}, reference=lambda n: {"lr": (math.nan,)} if n == 3 else {}
    )
    assert {cause.name for cause in found.causes} <= {"reported-lr"}


def test_a_nan_that_stays_is_that_of_an_idle_pass_if_it_comes_with_the_first_one():
    """The loss of the step is right: its micro-batches with rollouts are not what is NaN."""
    found = diagnosed(nan_from(3, loss=2.5), reference=idle_at_three)
    assert {cause.name for cause in found.causes} == {"idle-nan", "zero-denominator"}
    assert {cause.fit for cause in found.causes} == {Fit.PATTERN}


@pytest.mark.parametrize("change", [nan_from(2, loss=1.5), nan_from(4, loss=3.5), nan_from(3)])
def test_a_nan_in_another_step_or_in_the_loss_is_unknown(change):
    assert diagnosed(change, reference=idle_at_three).causes == ()


def test_steps_that_are_lost_with_idle_passes_and_one_that_is_not_are_unknown():
    """A step with idle passes came to an update, before another did not."""
    found = diagnosed(lambda n: {"skipped": True, "grad_norm": None} if n in (4, 6) else {})
    assert found.causes == ()


def test_a_factor_that_is_not_finite_is_no_factor():
    found = diagnosed(lambda n: {"loss": math.nan, "grad_norm": math.nan} if n > 2 else {})
    assert not any("nan" in cause.evidence.lower() and "times" in cause.evidence for cause in found.causes)
    assert "nan" not in " ".join(found.certain).lower()


def test_weights_are_not_said_to_agree_within_a_bound_that_training_does_not_leave():
    """Weights that training moves by less than what the candidate is off."""

    def slow(n, apart=0.0):
        sketch = (1000.0 + 1e-4 * n, apart, *[1.0] * 14)
        checksum = sha256(repr(sketch).encode()).hexdigest()
        return {"weights": Weights(checksum=checksum, norm=1000.0, sketch=sketch), "grad_norm": None}

    found = diagnosed(lambda n: {**slow(n, 2e-4), "loss": 0.7 * n}, reference=slow)
    assert not any("weights" in one for one in found.certain if one.startswith("agree"))
    assert any("no proof" in one for one in found.certain)
    assert {"data", "loss", "logging"} <= set(found.classes)
    assert found.causes == ()


def test_weights_that_training_never_moves_prove_nothing():
    still = weights(1)
    found = diagnosed(lambda n: {"weights": still, "lr": (0.5,)}, reference=lambda n: {"weights": still})
    assert {cause.name for cause in found.causes} > {"reported-lr"}
    assert "schedule" in found.classes


def test_a_schedule_by_steps_beside_one_by_rollouts_is_named():
    reached = [sum(ROLLOUTS[:n]) for n in range(6)]
    found = causes(
        trained(lambda n: {"lr": (0.025 + 0.0025 * (n - 1),)} if n > 1 else {}),
        reference=lambda n: {"lr": (0.025 + 0.0002 * reached[n - 1],)},
    )
    assert found[0].name == "scheduler-per-dynamic-step"


@pytest.mark.parametrize(
    ("reference", "faulty"),
    [
        (lambda n: 0.05 * 0.5 ** ((n - 1) // 2), lambda n: 0.05 * 0.5 ** ((n - 1) // 3)),
        (lambda n: 0.05 * 0.5 ** ((n - 1) // 2), lambda n: 0.05 * 0.5 ** ((n - 1) // 4)),
        (lambda n: 0.025 * min(2.0, n / 3), lambda n: 0.025 * min(2.0, n / 4)),
        (lambda n: 0.05 * min(1.0, n / 3), lambda n: 0.05 * min(1.0, max(1, n - 2) / 3)),
    ],
)
def test_a_move_or_two_are_no_schedule_by_rollouts(reference, faulty):
    """One move is a share of one window, whatever moves it."""
    first = next(n for n in range(1, 7) if reference(n) != faulty(n))
    found = causes(
        lambda n: {"lr": (faulty(n),)} | ({"weights": weights(n, n - first + 1.0)} if n >= first else {}),
        reference=lambda n: {"lr": (reference(n),)},
    )
    assert "scheduler-per-dynamic-step" not in {cause.name for cause in found}


def test_other_tokens_from_a_step_on_are_other_data():
    found = diagnosed(trained(lambda n: {"tokens": 7 * n, "loss": 9.0 * n, "grad_norm": 5.0} if n > 3 else {}))
    assert found.causes == ()
    assert "data" in found.classes
    assert "first to differ, in step 4: tokens, loss" in found.certain[0]


@pytest.mark.parametrize("loss", [1.0, 1e6])
@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("nearly", [1.0, 1 + 1e-9])
def test_a_metric_alone_shows_a_log_where_weights_or_equal_norms_do(size, nearly, loss):
    """A divergence from the first weights is as short as their way from there: another update changes it as well."""

    def logged(by, nearly=1.0, *, weights=False):
        def figures(n):
            shown = {"loss": (n - 0.5) * nearly * loss, "grad_norm": NORMS[n - 1] * nearly}
            return {**({} if weights else {"weights": None}), "metrics": {"kl": by * size * n**2}, **shown}

        return figures

    found = causes(logged(1.02, nearly), reference=logged(1.0))
    assert ("reported-metric" in {cause.name for cause in found}) == (nearly == 1.0), found
    found = causes(logged(1.02, nearly, weights=True), reference=logged(1.0, weights=True))
    assert "reported-metric" in {cause.name for cause in found}


METRICS = {
    "as large as later": (lambda n: 0.5 + 0.01 * n, lambda n: 1.2 * (0.5 + 0.01 * n), "reported-metric"),
    "from the third step on": (lambda n: 100.0, lambda n: 100.0 if n < 3 else 50.0, "reported-metric"),
    "NaN": (lambda n: 0.1 * n, lambda n: 0.1 * n if n < 3 else math.nan, "nan-in-metric-reduce"),
    "a divergence": (lambda n: 0.1 * n, lambda n: 0.1 * n if n < 3 else 0.12 * n, None),
}


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_that_is_no_divergence_is_logged_otherwise_where_norms_are_off_by_rounding(kind):
    due, logged, name = METRICS[kind]

    def run(metric, nearly):
        return lambda n: {
            "weights": None,
            "loss": (n - 0.5) * nearly,
            "grad_norm": NORMS[n - 1] * nearly,
            "metrics": {"it": metric(n), "other": 1.0},
        }

    found = causes(run(logged, 1 + 1e-7), reference=run(due, 1.0))
    assert next((cause.name for cause in found), None) == name, found


def test_the_evidence_of_a_metric_is_where_it_is_off():
    """And not the first steps, which may agree."""

    def logged(last):
        return lambda n: {"metrics": {"reward": last if n == 6 else 0.1 * n}}

    found = causes(logged(7.0), reference=logged(0.5))
    assert found
    assert all(cause.evidence.startswith("reward: 7 for 0.5; ") for cause in found), found


def test_a_metric_that_is_nan_in_both_is_no_wrong_log():
    """NaN equals nothing, so that the traces differ."""

    def logged(n):
        return {"metrics": {"reward": math.nan if n == 6 else 0.1 * n}}

    a, b = trace(logged, engine="torch", ranks=1), trace(logged)
    comparison = compare(a, b, Tier.REASSOCIATED)
    assert [one.name for one in comparison.found] == ["metrics.reward"]
    assert diagnose(a, b, comparison).causes == ()


def test_a_metric_that_rounding_alone_changed_is_no_evidence():
    def logged(kl, entropy=2.5):
        return lambda n: {"metrics": {"entropy": entropy, "kl": kl}}

    found = causes(logged(0.44, 2.5 * (1 + 1e-9)), reference=logged(0.4))
    assert {cause.name for cause in found} == {"reported-metric", "accuracy-of-means"}
    assert all(cause.evidence.startswith("kl: 0.44 for 0.4") for cause in found), found


def test_a_metric_that_keeps_the_step_before_is_named():
    def kept(n):
        at = n - 1
        own, before = 0.25 * (at % 3), 0.25 * ((at - 1) % 3)
        if n % 2:
            return {"metrics": {"reward": own}}
        m, n_ = ROLLOUTS[at - 1], ROLLOUTS[at]
        return {"metrics": {"reward": (before * m + own * n_) / (m + n_)}}

    assert causes(kept)[0].name == "reset-gated-by-logging"


def test_equal_traces_have_no_cause():
    assert causes(lambda n: {}) == ()


def test_traces_without_a_common_step_have_none_either():
    a, b = trace(steps=3), Trace(trace().header, ())
    assert diagnose(a, b, compare(a, b, Tier.EXACT)).causes == ()


def test_every_control_has_a_remedy_and_every_likeness_is_a_cause():
    names = {*known(), "late-boundary"}
    assert names <= REMEDIES.keys()
    assert {kind_of(name) for name in REMEDIES} == set(CLASSES)
    assert {like for control in known().values() for like in control.like} <= REMEDIES.keys()
    assert not WITHOUT_TRACE.keys() & known().keys()


FIGURES = st.sampled_from([None, 0.0, -0.5, 1.0, 2.5, math.nan, math.inf])
STEPS = st.fixed_dictionaries(
    {
        "rollouts": st.integers(0, 5),
        "passes": st.integers(0, 3),
        "idle_passes": st.integers(0, 3),
        "total": st.sampled_from([0.0, 1.0, 4.0]),
        "loss": FIGURES,
        "grad_norm": FIGURES,
        "lr": st.sampled_from([(), (0.0,), (0.1,), (0.2, 0.1)]),
        "skipped": st.booleans(),
        "metrics": st.dictionaries(st.just("reward"), st.sampled_from([0.0, 0.5, math.nan]), max_size=1),
    }
)


@given(st.lists(st.tuples(STEPS, STEPS), max_size=5), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_whatever_the_traces_hold_causes_come_with_evidence_likeliest_first(pairs, ranks, other):
    a = trace(lambda n: pairs[n - 1][0], steps=len(pairs), ranks=ranks)
    b = trace(lambda n: pairs[n - 1][1], steps=len(pairs), ranks=other)
    comparison = compare(a, b, Tier.REASSOCIATED)
    diagnosis = diagnose(a, b, comparison)
    found = diagnosis.causes
    assert not (comparison.equal and (found or diagnosis.classes))
    assert set(diagnosis.classes) <= set(CLASSES)
    assert all(name in REMEDIES for name in diagnosis.not_excluded)
    assert [cause.likelihood for cause in found] == sorted((cause.likelihood for cause in found), reverse=True)
    assert all(0 < cause.likelihood <= 1 and cause.evidence and cause.remedy for cause in found)
    assert len({cause.name for cause in found}) == len(found)


def test_causes_with_one_evidence_are_a_group_and_the_likeliest_group_comes_first():
    alone = Cause("gas-scaled-twice", Fit.EVERY_STEP, "a sixth in all steps")
    first, second = Cause("implicit-clip", Fit.DIRECTION, "scaled"), Cause("momentum", Fit.DIRECTION, "scaled")
    other = Cause("constant-factor", Fit.CONSTANT, "in all steps")
    assert grouped((alone, first, other, second)) == ((alone,), (first, second), (other,))
    assert grouped(()) == ()


def test_no_factor_explains_a_rate_where_none_was_due():
    """A warm-up from 0 that begins elsewhere is not twice the learning rate in every step."""
    due = (0.0, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
    found = diagnosed(
        lambda n: {"lr": (2 * due[n - 1] or 5e-4,), "weights": weights(n, apart=n)},
        reference=lambda n: {"lr": (due[n - 1],)},
    )
    assert "base-lr" not in {cause.name for cause in found.causes}
