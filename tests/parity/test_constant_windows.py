"""Where all windows hold as much, as they usually do, a gradient that is off by one number is off by a constant."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import Fit, diagnose, grouped
from tests.parity.test_diagnosis import causes, off, total, trace

ROLLOUTS, PASSES = 12, 4


def even(number):
    """Windows of 12 rollouts in four passes, of which one is idle: 7 micro-batches."""
    return {"total": float(ROLLOUTS), "rollouts": ROLLOUTS, "passes": PASSES, "idle_passes": 1, "weights": None}


def named(factor, **options):
    found = causes(lambda n: {**off(lambda n: factor)(n), **even(n)}, reference=even, **options)
    assert {cause.fit for cause in found} == {Fit.CONSTANT}
    assert all("times the reference's" in cause.evidence for cause in found)
    assert len(grouped(found)) == 1, "one number proves no cause more than another"
    names = {cause.name for cause in found}
    assert "reported-norm" in names, "without weights a log that is off has the same record"
    return names - {"reported-norm"}


@pytest.mark.parametrize("factor", [0.3, 0.7, 3.0, 12.5 / 12, 0.1])
def test_a_constant_is_called_one_where_totals_do_not_vary(factor):
    """Neither a target of 17.14 or of 40 rollouts, nor an idle pass of 5.14 or of 28."""
    assert named(factor) == {"constant-factor"}


@pytest.mark.parametrize(
    ("factor", "others"),
    [
        (12 / 11, {"target-not-actual"}),  # the last pass may have taken a window from 9 rollouts to 12
        (12 / 10, {"target-not-actual"}),
        (12 / 9, set()),  # a window of 9 would have ended a pass earlier
        (12 / 13, {"idle-counted"}),
        (12 / 15, {"idle-counted"}),
        (12 / 16, set()),  # no micro-batch is twice as long as an average one
        (12 / 13.5, set()),
    ],
)
def test_a_number_that_a_fault_may_have_is_told_beside_a_constant(factor, others):
    assert named(factor) == {"constant-factor", *others}


@pytest.mark.parametrize(("factor", "name"), [(0.5, "dp-mean-left-in"), (2.0, "constant-factor")])
def test_a_factor_that_ranks_explain_needs_no_constant(factor, name):
    """A mean over ranks makes gradients too small."""
    assert named(factor) == {name}


def test_passes_explain_a_factor_too():
    assert named(1 / PASSES) == {"gas-scaled-twice"}


def test_a_whole_number_on_one_rank_may_be_a_constant_as_well():
    assert named(3.0, ranks=1) == {"constant-factor", "sp-factor-by-stage"}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_or_two_prove_no_target_either(steps):
    """The totals of two windows differ, and any factor at all is one over some target."""
    short = off(lambda n: total(n) / 1711)
    a, b = trace(steps=steps), trace(lambda n: {**short(n), "weights": None}, steps=steps)
    found = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    assert "target-not-actual" not in {cause.name for cause in found}, found


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sum_that_nothing_divides_is_over_a_target_of_1_only_where_one_pass_reaches_it(passes):
    held = (3, 2, 4, 2, 3, 2)

    def windows(n):
        return {"rollouts": held[n - 1], "total": float(held[n - 1]), "passes": passes, "idle_passes": 0}

    undivided = off(lambda n: held[n - 1])
    found = causes(lambda n: {**undivided(n), **windows(n)}, reference=windows)
    assert {cause.name for cause in found} == {"another-divisor", *(("target-not-actual",) if passes == 1 else ())}


def test_totals_that_vary_prove_a_target_and_no_constant():
    found = causes(off(lambda n: total(n) / 1711))
    assert [(cause.name, cause.fit) for cause in found] == [("target-not-actual", Fit.EVERY_STEP)]


@pytest.mark.parametrize("norm", [5e-324, 1e-300, 1e300])
def test_a_factor_beyond_all_numbers_ends_no_search(norm):
    assert isinstance(causes(lambda n: {**even(n), "grad_norm": norm}, reference=even, ranks=1), tuple)


@pytest.mark.parametrize(
    ("rollouts", "passes"),
    [
        ((5, 4, 6, 4, 5, 4), (7, 6, 7, 6, 7, 6)),  # turns of a rollout: no pass but its last finishes it
        ((8, 7, 9, 8, 7, 9), (8, 7, 9, 8, 7, 9)),  # the caller ends windows, and the target is a nominal one
        ((5, 4, 6, 4, 5, 4), (3, 2, 3, 2, 3, 2)),
    ],
)
def test_a_target_divides_whatever_the_number_of_passes_is(rollouts, passes):
    def windows(number):
        at = number - 1
        return {"rollouts": rollouts[at], "total": float(rollouts[at]), "passes": passes[at], "idle_passes": 0}

    factor = off(lambda number: rollouts[number - 1] / 4)
    found = causes(lambda number: {**factor(number), **windows(number)}, reference=windows)
    assert "target-not-actual" in [cause.name for cause in found if cause.fit is Fit.EVERY_STEP]
