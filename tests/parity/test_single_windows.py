"""Runs of one window, or of few: no end of theirs but the one of the data tells what ends them."""

import random

import pytest

from tests.parity.test_window_faults import cut, named, stream


def late(held, target):
    """Every window ends a pass behind the one that reaches the target."""
    return cut(held, target, carried=False, ended=lambda count, had, passes, target: passes > 1 and had - 2 >= target)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("due", "own"), [([(4, 2), (2, 1)], [(6, 3)]), ([(4, 2), (4, 2)], [(8, 3)]), ([(2, 1), (1, 1)], [(3, 2)])]
)
def test_one_window_in_the_place_of_two_is_compared(due, own, ranks):
    """It is a pass longer than the reference's first one, and may end with the data or a pass late."""
    groups = named(due, own, ranks=ranks, idle=0)
    assert all("another-target" in group for group in groups if "boundary-a-pass-late" in group)


def test_one_window_that_is_all_of_the_data_may_end_a_pass_late():
    assert "boundary-a-pass-late" in named([(4, 2), (2, 1)], [(6, 3)], idle=0)[0]


def test_windows_that_all_end_a_pass_late_stay_named():
    held = stream("alike")
    groups = named(cut(held, 6, carried=False), late(held, 6), idle=0)
    assert any("boundary-a-pass-late" in group for group in groups)


def test_a_window_of_one_pass_that_others_follow_is_none_that_ends_late():
    groups = named([(4, 2), (2, 1), (3, 1), (4, 2)], [(6, 3), (3, 1), (4, 2)], idle=0)
    assert not any("boundary-a-pass-late" in group for group in groups)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_does_not_reach_the_target_before_the_data_end_is_named_where_they_end_the_only_window(seed, ranks):
    """Each rank has one or two rollouts in a pass, and the target is one that two passes of all ranks reach."""
    draw = random.Random(seed)
    ranks_have = [[draw.randint(1, 2) for _ in range(ranks)] for _ in range(4)]
    target = 3 * ranks
    held = [sum(it) for it in ranks_have]
    due, own = cut(held, target, carried=False), [(sum(held), len(held))]
    alone = max(sum(of_rank) for of_rank in zip(*ranks_have, strict=True)) < target
    group = {name for group in named(due, own, ranks=ranks, idle=0) for name in group}
    assert not alone or ("local-count" in group and "another-target" in group)


def test_a_rank_that_must_have_reached_the_target_before_is_not_named():
    """Before their last passes 34 rollouts were on two ranks at the least, so that one had 17, and a target is 8."""
    groups = named([(8, 1)] * 5, [(40, 5)], idle=0)
    assert groups
    assert not any("local-count" in group for group in groups)


def test_windows_of_one_rank_stay_another_target_alone():
    groups = named([(8, 2), (9, 2)], [(17, 4)], ranks=1, idle=0)
    assert any("another-target" in group for group in groups)
    assert not any("local-count" in group for group in groups)


def test_a_surplus_that_one_resume_forgets_is_named_in_a_run_of_three_windows():
    """One that is dropped behind every window has the same record there."""
    groups = named([(41, 7), (35, 7), (26, 4)], [(41, 7), (39, 8), (22, 3)], ranks=3, idle=0)
    assert {"resume-resets-window", "another-overshoot"} <= groups[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["few", "many"])
def test_a_resume_behind_the_first_window_is_named(name, seed):
    held = stream(name, seed=seed)
    due = cut(held)
    own = [due[0], *cut(held[due[0][1] :])]
    assert due == own or "resume-resets-window" in named(due, own)[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["few", "many"])
def test_a_surplus_that_is_dropped_behind_every_window_of_many_is_no_resume_behind_the_first(name, seed):
    held = stream(name, seed=seed)
    groups = named(cut(held), cut(held, carried=False))
    assert "another-overshoot" in groups[0]
    assert not any("resume-resets-window" in group for group in groups)
