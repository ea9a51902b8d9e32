"""The probe's arithmetic: an update is taken apart into the gradients that made it, and the pattern is named."""

import math

import numpy as np
import pytest

from ds_parity.parity.probe.decomposition import TOLERANCE, decompose

EXPECTED = [[0.1, 0.2], [0.3, 0.1], [0.1, 0.2]]  # three passes, two ranks


def gradients(count=6, parameters=400, idle=(), seed=0):
    drawn = np.random.default_rng(seed).normal(size=(count, parameters)) * 10.0 ** np.arange(count)[:, None]
    drawn[list(idle)] = 0.0
    return drawn


def update(coefficients, rows):
    return np.array(coefficients).reshape(-1) @ rows


def pattern(coefficients, expected=EXPECTED, rows=None):
    rows = gradients(np.array(expected).size) if rows is None else rows
    return decompose(update(coefficients, rows), rows, expected).pattern


@pytest.mark.parametrize("seed", range(5))
def test_known_coefficients_are_recovered_from_gradients_of_very_different_length(seed):
    rows = gradients(seed=seed)
    wanted = np.random.default_rng(seed + 100).uniform(-1, 1, size=(3, 2))
    found = decompose(update(wanted, rows), rows, EXPECTED)
    np.testing.assert_allclose(found.measured, wanted, rtol=0, atol=1e-9)
    assert found.residual < 1e-12
    assert found.condition < 2


@pytest.mark.parametrize("tolerance", TOLERANCE.values())
def test_the_right_coefficients_are_within_and_a_wrong_one_is_not(tolerance):
    rows = gradients()
    right = decompose(update(EXPECTED, rows), rows, EXPECTED)
    assert right.within(tolerance)
    assert right.expected == EXPECTED
    wrong = [[0.1, 0.2], [0.3, 0.1], [0.1, 0.2 + 0.3 * 2 * tolerance]]
    assert not decompose(update(wrong, rows), rows, EXPECTED).within(tolerance)


def test_the_error_is_in_units_of_the_greatest_expected_coefficient():
    rows = gradients()
    off = [[0.1, 0.2], [0.3, 0.1], [0.1, 0.26]]
    assert decompose(update(off, rows), rows, EXPECTED).error == pytest.approx(0.06 / 0.3, rel=1e-9)


def test_an_idle_pass_has_coefficient_0_and_disturbs_no_other():
    expected = [[0.0, 0.4], [0.6, 0.0]]
    rows = gradients(4, idle=(0, 3))
    found = decompose(update(expected, rows), rows, expected)
    assert found.measured[0][0] == found.measured[1][1] == 0.0
    assert found.pattern == "as expected"
    assert found.within(1e-9)


def test_an_update_that_no_micro_batch_explains_is_in_the_residual_and_never_within():
    """Half the update lies at right angles to every gradient: what an idle pass adds to a step shows here alone."""
    rows = gradients(2, parameters=3)
    inside = update([[0.5, 0.5]], rows)
    outside = np.cross(*rows)
    outside *= np.linalg.norm(inside) / np.linalg.norm(outside)
    found = decompose(inside + outside, rows, [[0.5, 0.5]])
    assert found.residual == pytest.approx(math.sqrt(0.5), rel=1e-9)
    assert found.pattern == "as expected"
    assert "something else entered it" in found.said(0.5)
    assert not found.within(0.5)


def test_gradients_that_are_nearly_sums_of_others_are_flagged_though_the_coefficients_are_right():
    rows = gradients(4)
    rows[3] = rows[0] / np.linalg.norm(rows[0]) + 1e-5 * rows[3] / np.linalg.norm(rows[3])
    expected = [[0.25, 0.25], [0.25, 0.25]]
    found = decompose(update(expected, rows), rows, expected)
    assert found.condition > 1e4
    assert "can't be told" in found.pattern
    assert found.alike == 0
    assert found.error < 1e-5
    assert not found.within(1.0)


def with_equals():
    """Six gradients, of which the fourth is the first again and the sixth twice the second, the other way."""
    rows = gradients()
    rows[3], rows[5] = rows[0], -2 * rows[1]
    rows[[3, 5]] *= 1 + 1e-8 * np.random.default_rng(1).normal(size=(2, 400))  # as fp32 rounds
    return rows


def test_equal_micro_batches_are_measured_by_their_sum():
    rows = with_equals()
    found = decompose(update(EXPECTED, rows), rows, EXPECTED)
    assert found.alike == 2
    assert found.within(1e-6)
    assert found.pattern == "as expected"
    halved = decompose(update(np.array(EXPECTED) / 2, rows), rows, EXPECTED)
    assert not halved.within(0.1)


@pytest.mark.parametrize("lost", range(6))
def test_an_equal_micro_batch_that_did_not_enter_is_seen(lost):
    rows = with_equals()
    entered = np.array(EXPECTED).reshape(-1)
    entered[lost] = 0.0
    found = decompose(update(entered, rows), rows, EXPECTED)
    assert not found.within(0.02)
    assert found.residual < 1e-6


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (np.zeros((2, 5)), "gradients are 0"),
        (np.array([[math.inf, 1.0], [1.0, 0.0]]), "own gradient is not finite"),
        (np.array([[math.nan, 1.0], [1.0, 0.0]]), "own gradient is not finite"),
    ],
)
def test_gradients_that_tell_nothing_are_named_and_never_within(rows, said):
    found = decompose(np.ones(rows.shape[1]), rows, [[0.5, 0.5]])
    assert said in found.pattern
    assert not found.within(math.inf)


def test_more_gradients_than_parameters_are_flagged():
    """Four vectors in three dimensions are always dependent: their coefficients are not determined."""
    rows = np.random.default_rng(0).normal(size=(4, 3))
    expected = [[0.25, 0.25], [0.25, 0.25]]
    assert not decompose(update(expected, rows), rows, expected).condition < 1e3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_with_nan_or_inf_is_never_within(bad):
    rows = gradients()
    step = update(EXPECTED, rows)
    step[7] = bad
    assert not decompose(step, rows, EXPECTED).within(math.inf)


def test_pattern_as_expected():
    assert pattern(EXPECTED) == "as expected"


def test_a_share_that_is_off_by_more_than_rounding_is_not_called_as_expected():
    rows, shares = gradients(), np.array(EXPECTED)
    shares[0, 0] *= 1.001
    found = decompose(update(shares, rows), rows, EXPECTED)
    assert not found.within(1e-5)
    assert found.said(1e-5).startswith("shares that lie near the weights, and not as near as rounding leaves them (")
    assert found.said(1e-2).startswith("as expected (")


def test_pattern_of_an_update_of_zero():
    assert pattern(np.zeros((3, 2))) == "nothing entered the step"


@pytest.mark.parametrize(("factor", "named"), [(1 / 2, "0.5"), (2, "2"), (1 / 3, "0.3333"), (-1, "-1")])
def test_pattern_of_one_factor_on_everything_such_as_a_half_for_two_ranks(factor, named):
    assert pattern(np.array(EXPECTED) * factor) == f"all off by the same factor, {named}"


def test_pattern_of_one_factor_where_a_rank_is_idle():
    expected = [[0.0, 0.4], [0.6, 0.0]]
    named = pattern(np.array(expected) / 2, expected, gradients(4, idle=(0, 3)))
    assert named == "all off by the same factor, 0.5"


def test_pattern_of_earlier_passes_overwritten():
    named = pattern([[0, 0], [0, 0], [0.1, 0.2]])
    assert named.startswith("only the last pass entered the step")


def test_pattern_of_a_missing_first_pass():
    assert pattern([[0, 0], [0.3, 0.1], [0.1, 0.2]]) == "the first pass is missing"


def test_pattern_of_a_missing_first_pass_where_a_rank_is_idle_in_a_later_one():
    expected = [[0.25, 0.25], [0.25, 0.0], [0.125, 0.125]]
    named = pattern([[0, 0], *expected[1:]], expected, gradients(6, idle=(3,)))
    assert named == "the first pass is missing"


def test_pattern_of_other_shares():
    assert pattern([[1 / 6] * 2] * 3) == "micro-batches entered with other shares than their weights"


@pytest.mark.parametrize("passes", [2, 3])
def test_wrong_shares_after_an_idle_first_pass_are_not_called_a_missing_pass(passes):
    """Nothing of the first pass should have entered, so nothing of it is missing."""
    expected = [[0.0, 0.0], *[[0.3 / (passes - 1), 0.7 / (passes - 1)]] * (passes - 1)]
    measured = [[0.0, 0.0], *[[0.5 / (passes - 1)] * 2] * (passes - 1)]
    named = pattern(measured, expected, gradients(2 * passes, idle=(0, 1)))
    assert named == "micro-batches entered with other shares than their weights"


@pytest.mark.parametrize(
    ("share", "said"), [(0.95, "another loss"), (0.6, "another loss"), (0.3, "something else entered the step")]
)
def test_an_update_that_gradients_do_not_explain_is_not_said_to_have_other_shares(share, said):
    """Whatever the coefficients are of the part that is explained."""
    rows = gradients()
    for coefficients in (np.full((3, 2), 1 / 6), np.array(EXPECTED) / 2):
        step = update(coefficients, rows)
        other = np.random.default_rng(5).normal(size=step.shape)
        other -= rows.T @ np.linalg.lstsq(rows.T, other, rcond=None)[0]
        other *= np.linalg.norm(step) / np.linalg.norm(other) * share / math.sqrt(1 - share**2)
        found = decompose(step + other, rows, EXPECTED)
        assert found.residual == pytest.approx(share)
        assert found.pattern.startswith(f"{share:.0%} of the update is no sum")
        assert said in found.pattern
        assert not found.within(1e-5)


def test_an_update_of_which_nothing_is_explained_is_another_loss_and_not_nothing():
    rows = gradients(parameters=7)
    rows[:, 6] = 0.0
    found = decompose(np.eye(7)[6], rows, EXPECTED)
    assert "another loss" in found.pattern


TERMS = ("policy", "kl")
OF_TERMS = [[0.5, 0.1, 0.0, 0.6], [0.25, 0.9, 0.25, 0.3]]  # two passes, two ranks of two terms


def test_each_term_has_a_table_of_its_own():
    rows = gradients(8)
    found = decompose(update(OF_TERMS, rows), rows, OF_TERMS, TERMS)
    assert found.within(1e-9)
    measured, expected = found.of_term("kl")
    assert expected == [[0.1, 0.6], [0.9, 0.3]]
    np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-9)


ROUNDED = {"dtype": "bf16"}


def of_one_direction(seed=7):
    """Gradients that have much in common, a condition of about 25, and rounding that follows them."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=20000)
    rows = np.stack([common + 0.1 * rng.normal(size=20000) for _ in range(6)])
    return rows, 3e-3 * np.abs(common) * rng.normal(size=20000)


def test_rounding_that_the_residual_shows_is_no_error():
    rows, noise = of_one_direction()
    found = decompose(update(EXPECTED, rows) + noise, rows, EXPECTED, **ROUNDED)
    assert found.error > 1e-3
    assert found.within(1e-5)
    # In fp32 nothing rounds so far.
    assert not decompose(update(EXPECTED, rows) + noise, rows, EXPECTED).within(1e-5)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("times", [0.3, 1.0, 3.0, 10.0])
def test_rounding_hides_no_factor_of_any_micro_batch(times, at, factor):
    """It is found, or nothing is said to be right."""
    rows, noise = of_one_direction(at)
    wrong = np.array(EXPECTED).reshape(-1)
    wrong[at] *= factor
    assert not decompose(update(wrong, rows) + times * noise, rows, EXPECTED, **ROUNDED).within(1e-5)


def test_where_rounding_hides_a_coefficient_nothing_is_said_to_be_right():
    rows, noise = of_one_direction()
    hidden = decompose(update(EXPECTED, rows) + 12 * noise, rows, EXPECTED, **ROUNDED)
    assert "probe in fp32" in hidden.pattern
    assert not hidden.within(1.0)


def test_a_layer_that_is_missing_is_no_rounding_in_fp32():
    """A hundredth of the parameters, by which no coefficient changes much."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(6, 20000))
    left_out = update(EXPECTED, rows)
    left_out[:20] = 0.0
    found = decompose(left_out, rows, EXPECTED)
    assert found.residual < 0.05
    assert not found.within(1e-5)
