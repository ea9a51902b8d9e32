"""A difference is explained by its numbers, with the remedy; without a difference there is nothing to explain."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import Cause, diagnose, grouped
from ds_parity.parity.diagnosis.causes import REMEDIES
from ds_parity.parity.subjects.controls.known import WITHOUT_TRACE, known
from ds_parity.trace import Header, StepRecord, Trace, Weights

ROLLOUTS = (13, 14, 13, 8, 12, 7)
LR = (0.025, 0.0275, 0.03, 0.0325, 0.035, 0.0375)
NORMS = (0.9, 0.7, 1.4, 0.8, 1.1, 0.6)


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
        "weights": Weights(checksum="a" * 64, norm=10.0 + at, sketch=(1.0, 2.0)),
        "metrics": {"reward": 0.25 * (at % 3)},
    }
    return StepRecord(step=number, **{**figures, **changed})


def trace(change=lambda number: {}, steps=6, engine="ds_parity", ranks=2, seed=1):
    header = Header(scenario="toy", seed=seed, versions={}, device="cpu", ranks=ranks, config_hash="ab", engine=engine)
    return Trace(header, tuple(step(number, **change(number)) for number in range(1, steps + 1)))


def causes(change, *, reference=lambda number: {}, **options):
    ranks = options.get("ranks", 2)
    a, b = trace(reference, engine="torch", ranks=1), trace(change, **options)
    assert b.header.ranks == ranks
    return diagnose(a, b, compare(a, b, Tier.REASSOCIATED))


def off(factor):
    """The gradient norm off by a factor, and the weights from the first step on in which it is."""

    def changed(number):
        found = {"grad_norm": NORMS[number - 1] * factor(number)}
        if any(factor(earlier) != 1.0 for earlier in range(1, number + 1)):
            found["weights"] = Weights(checksum="b" * 64, norm=20.0 + number)
        return found

    return changed


def total(number):
    return 100.0 * ROLLOUTS[number - 1]


def scaled(factor, **others):
    """Loss and gradient norm off by a factor, and what else a step says."""

    def changed(number):
        found = {"loss": (0.5 + number - 1) * factor(number), "grad_norm": NORMS[number - 1] * factor(number)}
        found |= {"weights": Weights(checksum="b" * 64, norm=20.0 + number)}
        return found | {name: value(number) for name, value in others.items()}

    return changed


def held(*rollouts, passes=None):
    return lambda n: {
        "rollouts": rollouts[n - 1],
        "passes": passes[n - 1] if passes else 4,
        "grad_norm": 0.3,
        "loss": 9.0,
        "tokens": 1,
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
    "running-total": (off(lambda n: (1.9, 2.7, 3.2, 1.5, 1.4, 2.0)[n - 1]), {}),
    "last-backward-only": (off(lambda n: (0.5, 0.9, 0.8, 1.1, 0.6, 0.7)[n - 1]), {}),
    "mean-of-micro-batches": (off(lambda n: (1.02, 0.9, 1.4, 0.9, 1.2, 1.1)[n - 1]), {}),
    "aux-term-scaled-apart": (off(lambda n: (1.001, 0.97, 1.07, 0.96, 1.03, 1.02)[n - 1]), {}),
    "sticky-boundary": (off(lambda n: (1.0, 0.9, 1.2, 1.0, 0.75, 0.9)[n - 1]), {}),
    "mid-window-checkpoint": (off(lambda n: (1.0, 0.9, 1.001, 1.002, 0.999, 1.0)[n - 1]), {}),
    "implicit-clip": (lambda n: {"weights": Weights(checksum="b" * 64, norm=99.0)} if n > 2 else {}, {}),
    "clip-at-wrong-scale": (lambda n: {"weights": Weights(checksum="b" * 64, norm=99.0)}, {}),
    "idle-nan": (lambda n: {"grad_norm": None, "skipped": True}, {}),
    "scheduler-per-pass": (lambda n: {"lr": (0.0325 + 0.01 * (n - 1),)}, {}),
    "base-lr": (lambda n: {"lr": (LR[n - 1] * 1.5,)}, {}),
    "scheduler-budget-in-passes": (lambda n: {"lr": (0.025 + 0.0025 / 4 * (n - 1),)}, {}),
    "scheduler-per-outer-step": (lambda n: {"lr": (0.025 + 0.0025 * ((n - 1) // 2),)}, {}),
    "lr-reported-a-step-off": (lambda n: {"lr": ((*LR, 0.04)[n],)}, {}),
    "returned-loss-scaled": (lambda n: {"loss": (0.5 + n - 1) / 4}, {}),
    "metrics-mean-of-ranks": (lambda n: {"loss": (0.6, 1.2, 2.9, 3.1, 4.4, 5.6)[n - 1]}, {}),
    "nan-in-metric-reduce": (lambda n: {"metrics": {"reward": math.nan}}, {}),
    "accuracy-of-means": (lambda n: {"metrics": {"reward": 0.3 * (n % 3)}}, {}),
    "data-or-seed": (lambda n: {"loss": 7.0 * n, "grad_norm": 3.0 / n}, {"seed": 2}),
    "partial-window-leak": (lambda n: {}, {"steps": 5}),
    "boundary-off-by-one": (held(2, 14, 13, 8, 12, 7, passes=(1, 4, 4, 4, 4, 4)), {}),
    "equality-boundary": (held(48, 7, passes=(16, 3)), {"steps": 2}),
    "local-count": (held(26, 27, 14), {"steps": 3}),
    "resume-resets-window": (held(13, 14, 13, 12, 9, 6, passes=(4, 4, 5, 4, 3, 2)), {}),
    "resume-resets-schedule": (lambda n: {"lr": (LR[n - 1 - 2 * (n > 2)],)}, {}),
    "resume-loses-optimizer": (
        lambda n: {"weights": Weights(checksum="b" * 64, norm=99.0)} if n > 1 else {},
        {},
    ),
    "resume-repeats-data": (lambda n: {"loss": 0.52 + n - 4, "grad_norm": NORMS[n - 4]} if n > 3 else {}, {}),
    "silent-truncation": (held(12, 12, 12, 8, 12, 6, passes=(4, 5, 4, 3, 4, 3)), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_the_fault_that_was_put_in(name):
    change, options = CASES[name]
    found = causes(change, **options)
    assert found, "a difference without a cause"
    assert found[0].name == name, [(cause.name, cause.likelihood) for cause in found]


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
    assert all(cause.likelihood < 0.5 and "coefficient" in cause.evidence for cause in blamed), blamed


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


def test_a_schedule_that_moves_on_a_skipped_step_is_named():
    def skipped(n):
        return {"skipped": True, "grad_norm": None, "loss": None, "total": 0.0} if n == 2 else {}

    def behind(n):
        return {**skipped(n), "lr": (LR[n - 1 - (n > 2)],)}

    found = causes(skipped, reference=behind)
    assert found[0].name == "scheduler-on-skipped-step"


def test_an_lr_that_is_told_a_step_late_is_named_and_one_that_trains_so_is_not():
    """The step before's, from the second step on."""

    def late(n):
        return {"lr": (LR[max(n - 2, 0)],)}

    assert causes(late)[0].name == "lr-reported-a-step-off"
    found = causes(lambda n: {**late(n), "grad_norm": NORMS[n - 1] * (1.0 if n < 3 else 1.1)})
    assert found
    assert "lr-reported-a-step-off" not in [cause.name for cause in found]


def test_an_lr_is_told_off_by_a_step_only_as_surely_as_what_was_compared_shows():
    """A real shift moves weights at once, a loss of four digits hardly; an LR alone shows nothing."""

    def told(n):
        return {"lr": ((*LR, 0.04)[n],)}

    for absent, name in (
        (("weights",), "lr-reported-a-step-off"),
        (("weights", "grad_norm"), "scheduler-per-pass"),
        (("weights", "grad_norm", "loss"), "scheduler-per-pass"),
    ):
        found = causes(
            lambda n, absent=absent: {**told(n), **dict.fromkeys(absent)},
            reference=lambda n, absent=absent: dict.fromkeys(absent),
        )
        assert found[0].name == name, absent
        evidence = [cause.evidence for cause in found if cause.name == "lr-reported-a-step-off"]
        assert bool(evidence) == (len(absent) < 3)
        assert all(field not in one for one in evidence for field in absent)


@pytest.mark.parametrize("name", CASES)
def test_causes_name_steps_by_their_number_also_where_a_trace_begins_later(name):
    def renumbered(held):
        return Trace(held.header, tuple(record.model_copy(update={"step": record.step + 40}) for record in held.steps))

    change, options = CASES[name][0], dict(CASES[name][1])
    reference = options.pop("reference", lambda number: {})
    a, b = renumbered(trace(reference, engine="torch", ranks=1)), renumbered(trace(change, **options))
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert found[0].name == name
    named = [int(n) for cause in found for n in re.findall(r"\bsteps? \[?(\d+)", cause.evidence)]
    named += [int(n) for cause in found for n in re.findall(r"\bsteps \d+ to (\d+)", cause.evidence)]
    assert all(number > 40 for number in named), [cause.evidence for cause in found]


def test_what_a_foreign_trace_does_not_say_is_not_told():
    """It knows of no passes."""
    unknown = dict.fromkeys(("passes", "idle_passes"))
    found = causes(lambda n: {**unknown, "lr": (0.0325 + 0.01 * (n - 1),)}, reference=lambda n: unknown)
    assert found[0].name == "scheduler-per-pass"
    assert "passes" not in found[0].evidence


def test_a_schedule_by_steps_beside_one_by_rollouts_is_named():
    reached = [sum(ROLLOUTS[:n]) for n in range(6)]
    found = causes(
        lambda n: {"lr": (0.025 + 0.0025 * (n - 1),)}, reference=lambda n: {"lr": (0.025 + 0.0002 * reached[n - 1],)}
    )
    assert found[0].name == "scheduler-per-dynamic-step"


def test_other_tokens_from_a_step_on_are_other_data():
    found = causes(lambda n: {"tokens": 7 * n, "loss": 9.0 * n, "grad_norm": 5.0} if n > 3 else {})
    assert found[0].name == "resume-repeats-data"


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
    assert diagnose(a, b, compare(a, b, Tier.EXACT)) == ()


def test_every_control_has_a_remedy_and_every_likeness_is_a_cause():
    names = {*known(), "late-boundary"}
    assert names <= REMEDIES.keys()
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
    found = diagnose(a, b, comparison)
    assert not (comparison.equal and found)
    assert [cause.likelihood for cause in found] == sorted((cause.likelihood for cause in found), reverse=True)
    assert all(0 < cause.likelihood <= 1 and cause.evidence and cause.remedy for cause in found)
    assert len({cause.name for cause in found}) == len(found)


def test_causes_with_one_evidence_are_a_group_and_the_likeliest_group_comes_first():
    def cause(name, likelihood, evidence):
        return Cause(name, likelihood, evidence)

    alone = cause("gas-scaled-twice", 0.9, "a sixth in all steps")
    first, second = cause("running-total", 0.6, "no one factor"), cause("late-boundary", 0.3, "no one factor")
    other = cause("constant-factor", 0.5, "in all steps")
    assert grouped((alone, first, other, second)) == ((alone,), (first, second), (other,))
    assert grouped(()) == ()


def test_what_norms_alone_cannot_tell_apart_is_one_group():
    """Norms that are off by no one factor fit several faults."""
    odd = trace(lambda number: {"grad_norm": NORMS[number - 1] * (0.9, 1.3, 0.8, 1.2, 1.1, 0.95)[number - 1]})
    groups = grouped(diagnose(trace(), odd, compare(trace(), odd, Tier.REASSOCIATED)))
    assert len(groups) == 1
    assert "mean-of-micro-batches" in {cause.name for cause in groups[0]}
    assert len(groups[0]) == 6
