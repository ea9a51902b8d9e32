"""Where a schedule stands that is counted in rollouts."""

import random
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from ds_parity.window import Ledger, PassTotals, Progress, Rules


def run(target, sizes):
    """Every place that the progress stands at, the start included."""
    return list(accumulate(sizes, Progress.advanced, initial=Progress(target)))


def test_8429_uneven_steps_over_the_data_of_2400_nominal_ones_end_at_exactly_2400():
    """A running sum of fractions ends beside it, so that the last of a schedule's steps would depend on the cutting."""
    target, steps, nominal_steps = 640, 8_429, 2_400
    data = nominal_steps * target
    cuts = [0, *sorted(random.Random(0).sample(range(1, data), steps - 1)), data]
    sizes = [after - before for before, after in pairwise(cuts)]
    assert len(sizes) == steps
    assert len(set(sizes)) > 100
    *_, last = run(target, sizes)
    assert last.nominal == 2_400.0
    assert last.whole == 2_400
    *_, drifted = accumulate(size / target for size in sizes)
    assert drifted != 2_400.0


@given(st.integers(1, 1000), st.lists(st.integers(0, 5000), max_size=40))
def test_progress_is_units_over_target_wherever_it_stands(target, sizes):
    for done, place in zip(accumulate(sizes, initial=0), run(target, sizes), strict=True):
        assert place.nominal == done / target
        assert place.whole == done // target


@given(st.integers(1, 1000), st.lists(st.integers(0, 5000), max_size=40))
def test_whole_steps_carry_the_remainder_and_never_go_back(target, sizes):
    moves = [after.whole - before.whole for before, after in pairwise(run(target, sizes))]
    assert all(move >= 0 for move in moves)
    assert sum(moves) == sum(sizes) // target


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_only_steps_that_were_applied_move_it(steps):
    ledger = Ledger(Rules(target=4, ranks=1))
    for size, applied in steps:
        before = ledger.progress
        ledger.count(PassTotals(rollouts=size, active=int(size > 0)))
        ledger.end()
        ledger.settle(applied=applied)
        if not applied:
            assert ledger.progress == before
    assert ledger.progress == Progress(4, sum(size for size, applied in steps if applied))
    assert ledger.consumed == sum(size for size, _ in steps)


def test_it_counts_prompts_where_the_target_does():
    ledger = Ledger(Rules(target=2, ranks=1, count="prompt"))
    assert ledger.count(PassTotals(rollouts=9, prompts=3, active=1)).closed
    ledger.settle(applied=True)
    assert ledger.progress == Progress(target=2, units=3)
