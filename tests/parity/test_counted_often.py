"""Rollouts that count several times, as where sequence-parallel ranks share them: windows end with fewer of them."""

from dataclasses import replace

import pytest

from tests.parity.test_window_faults import ALIKE, STREAMS, cut, named, named_between, stream, trace


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_a_rollout_that_is_counted_often_is_named_beside_another_target_on_one_rank_alone(name, times, carried, ranks):
    held = stream(name)
    due, own = cut(held, 48, carried=carried), cut(held, 48 // times, carried=carried)
    for windows in (own, own[: len(due)]):  # a run may stop at as many steps
        group = named(due, windows, ranks=ranks)[0]
        assert "another-target" in group
        assert ("sp-double-count" in group) is (ranks == 1)


def test_a_rollout_that_is_counted_twice_is_named_where_no_whole_target_ends_windows_there():
    """Of 31 rollouts that count twice, 15.5 are enough; where no surplus is carried that is a target of 16."""
    held = [*ALIKE[:60], *stream("few"), *stream("odd")]
    assert "sp-double-count" in named(cut(held, 31), cut(held, 15.5))[0]
    groups = named(cut(held, 31, carried=False), cut(held, 15.5, carried=False))
    assert not any("sp-double-count" in group for group in groups)


@pytest.mark.parametrize("target", [10, 12, 14, 20, 30, 40])
@pytest.mark.parametrize("carried", [True, False])
def test_another_target_is_no_rollout_that_is_counted_often(target, carried):
    held = stream("odd")
    groups = named(cut(held, carried=carried), cut(held, target, carried=carried))
    assert "another-target" in groups[0]
    assert not any("sp-double-count" in group for group in groups)


def named_with_tokens(held, own, times, per_rollout):
    """Causes of windows in which a rollout of the candidate has its part of the reference's tokens."""
    due = trace(cut(held, 12), 1, 2)
    counted = trace(own, 2, 2)
    sides = [
        replace(
            one,
            steps=tuple(
                step.model_copy(update={"prompts": None, "tokens": count(step.rollouts)}) for step in one.steps
            ),
        )
        for one, count in ((due, lambda it: per_rollout * it), (counted, lambda it: per_rollout * it // times))
    ]
    return named_between(*sides)


@pytest.mark.parametrize("times", [2, 3, 8])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("name", STREAMS)
def test_what_the_candidate_counts_often_in_its_record_too_is_shown_by_tokens(name, carried, times):
    held = stream(name)
    own = cut([times * one for one in held], 12, carried=carried)
    groups = named_with_tokens(held, own, times, 50)
    assert groups[:1] == [{"sp-double-count"}] or (not carried and groups == [])


@pytest.mark.parametrize("target", [10, 24, 30])
def test_rollouts_of_two_parts_that_end_at_another_target_are_not_counted_often(target):
    """Where the reference counts pairs, so that its target is half of the candidate's."""
    held = stream("odd")
    groups = named_with_tokens(held, cut([2 * one for one in held], target), 2, 50)
    assert not any("sp-double-count" in group for group in groups)
