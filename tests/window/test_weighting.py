"""What a loss weighs, and what it is divided by."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.errors import WindowError
from ds_parity.window import Counts, Ledger, PassTotals, Rules, Weighting


def divisor(expected, weight, ranks, loss_reduction, peers=1):
    return Weighting("rollout", loss_reduction).divisor(expected, Counts(weight), ranks, peers)


@pytest.mark.parametrize("n", range(1, 65))
def test_n_equal_micro_batches_on_each_rank_are_divided_by_exactly_n(n):
    """For weights up to 100 and up to 64 ranks."""
    divisors = {
        divisor(float(n * ranks * weight), weight, ranks, "mean") for weight in range(1, 101) for ranks in range(1, 65)
    }
    assert divisors == {float(n)}


@given(st.integers(1, 64), st.integers(1, 2**31 - 1), st.integers(1, 4096))
def test_n_equal_micro_batches_are_divided_by_exactly_n_at_any_weight(n, weight, ranks):
    assert divisor(float(n * ranks * weight), weight, ranks, "mean") == n


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 4096), st.floats(-1e3, 1e3))
def test_deepspeeds_mean_over_ranks_leaves_weight_times_loss_over_the_expected_total(expected, weight, ranks, loss):
    mean = loss / divisor(float(expected), weight, ranks, "mean") / ranks
    assert mean == pytest.approx(weight * loss / expected, rel=1e-14, abs=1e-300)


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 4096))
def test_the_weight_of_a_summed_loss_is_in_it_already(expected, weight, ranks):
    assert divisor(float(expected), weight, ranks, "sum") == expected / ranks


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 8), st.booleans())
def test_peers_that_each_give_the_whole_loss_leave_it_once(expected, weight, ranks, peers, all_ranks):
    """Whether DeepSpeed averages over all ranks (ZeRO 3) or over the data-parallel ones."""
    averaged = ranks * peers if all_ranks else ranks
    reduced = peers / divisor(float(expected), weight, averaged, "mean", peers) / averaged
    assert reduced == pytest.approx(weight / expected, rel=1e-14)


def test_n_equal_micro_batches_of_sliced_sequences_are_divided_by_exactly_n_on_zero_3():
    for n, weight, ranks, peers in product(range(1, 33), (1, 3, 77), (1, 2, 3, 8), (2, 3, 4, 6)):
        assert divisor(float(n * ranks * weight), weight, ranks * peers, "mean", peers) == n


@pytest.mark.parametrize(
    ("loss_weight", "weighs"), [("rollout", (3, 5)), ("token", (70, 90)), ("pass", (1, 2)), ("target", (3, 5))]
)
def test_a_weighting_weighs_micro_batches_and_passes_in_the_unit_that_it_names(loss_weight, weighs):
    weighting = Weighting.configured(loss_weight, "mean", 12)
    assert (weighting.of(Counts(3, 1, 70)), weighting.of(PassTotals(5, 2, 90, 2))) == weighs
    assert weighting.constant == (12.0 if loss_weight == "target" else None)


def test_losses_that_are_divided_already_enter_with_weight_1_over_the_mean_of_ranks():
    """Each is divided by exactly 1, so that DeepSpeed's mean over ranks is what is left of it."""
    weighting = Weighting.divided(ranks=4)
    assert weighting.of(Counts(3, 1, 70)) == 1
    assert weighting.divisor(weighting.constant, Counts(3, 1, 70), 4) == 1.0


@pytest.mark.parametrize(
    ("loss_weight", "reduction", "counts", "silent"),
    [
        ("rollout", "mean", Counts(), True),
        ("rollout", "mean", Counts(tokens=5), True),
        ("rollout", "sum", Counts(tokens=5), False),
        ("token", "mean", Counts(rollouts=2), True),
        ("token", "mean", Counts(tokens=5), False),
        ("pass", "mean", Counts(tokens=5), False),
        ("pass", "sum", Counts(), True),
    ],
)
def test_what_weighs_nothing_is_silenced_unless_it_is_a_part_of_a_sum(loss_weight, reduction, counts, silent):
    assert Weighting.configured(loss_weight, reduction, 8).silences(counts) == silent


def test_a_weighting_is_chosen_between_windows_only():
    ledger = Ledger(Rules(target=4, ranks=2))
    ledger.weigh_by(Weighting.divided(2))
    ledger.count(PassTotals(2, 0, 20, 2))
    with pytest.raises(WindowError, match=r"window 0 has 1 passes that were weighed by 'divided'"):
        ledger.weigh_by(Weighting("token"))
