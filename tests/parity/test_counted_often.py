"""Rollouts that count several times, as where sequence-parallel ranks share them: windows end with fewer of them."""

import pytest

from tests.parity.test_window_faults import ALIKE, STREAMS, cut, named, stream


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
