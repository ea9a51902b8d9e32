"""What the passes of a window prove: each micro-batch holds a rollout, and no pass but the last reaches a target."""

import pytest

from ds_parity.parity.diagnosis.cut import before_last_passes
from tests.parity.test_window_faults import TARGET, cut, named, stream, trace

RANKS = 3
# Rollouts and passes of each step: of the reference, and of a candidate that took one step within the fourth window.
DUE = [
    (5, 1), (6, 1), (6, 1), (7, 2), (5, 1), (5, 1), (5, 1), (10, 2), (5, 1), (7, 2), (8, 2), (8, 2), (7, 2), (7, 2),
    (5, 1), (5, 1), (5, 1), (8, 2), (5, 1), (8, 2), (7, 2), (5, 1), (8, 2), (8, 2), (6, 2), (9, 2),
]  # fmt: skip
WITHIN = [*DUE[:3], (3, 1), (9, 2), *DUE[5:]]
FOUR_RANKS = [(9, 1), (9, 1), (9, 1), (14, 2), (8, 1), (17, 2), (12, 2), (14, 2), (13, 2), (15, 2), (14, 2), (8, 1)]
EARLY = [(5, 2), (3, 1), (3, 1), (6, 1), (3, 1), (4, 1), (6, 1), (5, 1), (6, 1), (6, 1), (4, 1), (2, 1), (4, 1), (5, 1)]


def names(due, own, ranks):
    return {name for group in named(due, own, ranks=ranks, idle=0) for name in group}


def test_a_surplus_is_not_carried_on_where_a_first_pass_would_have_reached_the_target_with_it():
    """Step 8 begins with a surplus of 4, and has two passes on three ranks: the first one brings 3 or more."""
    assert names(DUE, WITHIN, RANKS) == {"step-in-mid-window"}


def test_a_window_that_is_two_steps_is_no_surplus_either():
    own = [*FOUR_RANKS[:3], (6, 1), (8, 1), *FOUR_RANKS[4:]]
    found = names(FOUR_RANKS, own, 4)
    assert "step-in-mid-window" in found
    assert "another-overshoot" not in found


def test_a_target_of_one_or_two_is_not_named_where_two_passes_on_two_ranks_are_a_step():
    due = [(8, 3), (9, 2), (7, 2), (6, 1), (11, 2), (6, 1), (6, 2), (9, 2)]
    assert "another-target" not in names(due, EARLY, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("carried", [True, False])
def test_a_surplus_and_a_target_that_are_others_stay_named(carried, seed):
    held = stream("many", seed=seed)
    due = cut(held, carried=carried)
    assert "another-overshoot" in named(due, cut(held, carried=not carried), ranks=RANKS, idle=0)[0]
    assert "another-target" in named(due, cut(held, TARGET + 4, carried=carried), ranks=RANKS, idle=0)[0]


def test_as_many_rollouts_as_micro_batches_came_before_the_last_pass():
    assert before_last_passes(trace([(6, 1), (9, 3), (7, 2)], 1, 3, idle=0)) == [0, 6, 3]
    assert before_last_passes(trace([(6, 1), (9, 3), (7, 2)], 1, 3, idle=1)) == [0, 3, 1]
    assert before_last_passes(trace([(6, 1), (9, 3), (7, 2)], 1, 3, idle=0, passes=False)) == [0, 0, 0]


def test_a_micro_batch_that_held_no_rollout_leaves_open_what_the_others_held():
    assert before_last_passes(trace([(6, 1), (5, 2), (7, 2)], 1, 3, idle=0)) == [0, 0, 0]
