"""Ranks stop together between windows, and what they leave behind is gone on with as if they never had."""

import pytest

from tests.distributed import cells

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("stage", [str(stage) for stage in cells.STAGES])
class TestAStopThatOneRankAsksFor:
    def test_comes_on_all_ranks_at_the_boundary_after_the_next_exchange(self, two_ranks, stage):
        """Windows of 2, 3, 4, 4 passes. Without look-ahead the fourth pass tells it, with three the seventh to ninth."""
        for ahead, passes, windows in (("0", 5, 2), ("3", 9, 3)):
            found = two_ranks.results["stopped"][f"{stage} {ahead}"]
            assert found["told"] == [[False, True, [windows, 0], 4, passes]] * 2

    def test_holds_for_the_passes_after_it_too(self, two_ranks, stage):
        assert [two_ranks.results["stopped"][f"{stage} {ahead}"]["again"] for ahead in "03"] == [[0, 0]] * 2


class TestATraceThatIsGoneOnWith:
    def test_is_that_of_a_run_that_was_never_stopped(self, two_ranks):
        found = two_ranks.results["traces"]
        resumed, whole = (found[name].splitlines() for name in ("resumed", "whole"))
        assert len(whole) == 5
        assert resumed[1:] == whole[1:]
        assert resumed[0] == found["stood"].splitlines()[0]

    def test_is_left_alone_until_a_checkpoint_is_loaded_and_then_cut_back_to_its_step(self, two_ranks):
        found = two_ranks.results["traces"]
        assert found["untouched"]
        assert found["stood"].count("\n") == 4
        assert found["stood"].startswith(found["cut"])
        assert found["cut"].count("\n") == 3

    def test_is_overwritten_by_a_run_that_loads_none(self, two_ranks):
        found = two_ranks.results["traces"]
        assert found["fresh"].splitlines() == found["resumed"].splitlines()[:2]

    def test_is_kept_beside_a_new_one_where_it_ended_before_the_checkpoint(self, two_ranks):
        found = two_ranks.results["traces_that_end_early"]
        assert [line[:9] for line in found["kept"].splitlines()[1:]] == ['{"step":1']
        assert [line[:9] for line in found["new"].splitlines()[1:]] == ['{"step":4']
        assert "ends before step 3" in found["said"][0]


def test_latest_names_a_checkpoint_when_all_ranks_have_written_it_and_only_where_it_is_to(two_ranks):
    found = two_ranks.results["latest"]
    assert found["seen"] == [["two", "two"], ["one", "two", "two", "two"]]
    assert "latest.new" not in found["files"]


@pytest.mark.parametrize("saved", ["1", "2"])
@pytest.mark.parametrize("stage", ["0", "2"])
def test_windows_longer_than_the_look_ahead_go_on_bit_for_bit(two_ranks, stage, saved):
    """How many passes happened to be known of a window may not enter its gradient: a resumed run knows others."""
    assert two_ranks.results["looked_ahead"][f"{stage} {saved}"]
