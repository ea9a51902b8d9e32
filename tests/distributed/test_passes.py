"""Idle passes that are not run, streams that arrive as they are made, groups and turns over ranks."""

import re

import pytest

from ds_parity.planning import group_advantages
from tests.distributed import cells
from tests.distributed.ranked_passes import PROMPTS, REWARDS

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[str(stage) for stage in cells.STAGES])
def stage(request):
    return request.param


@pytest.mark.parametrize("ahead", ["0", "3"])
class TestSkippedIdlePasses:
    """Windows of 4 passes (rank 1 idle in the last two) and 3 (idle in all), the second one left open."""

    def test_come_to_the_same_bits_as_if_they_were_run(self, two_ranks, stage, ahead):
        assert two_ranks.results["skipped_idle"][f"{stage} {ahead}"]["equal"]

    def test_are_handed_out_at_the_boundary_and_at_a_windows_start_alone_on_zero_0_and_1(self, two_ranks, stage, ahead):
        found = two_ranks.results["skipped_idle"][f"{stage} {ahead}"]
        assert found["handed"] == ([7, 4] if stage in "01" else [7, 7])
        assert found["without skipping"] == [7, 7]

    def test_are_counted_all_the_same(self, two_ranks, stage, ahead):
        found = two_ranks.results["skipped_idle"][f"{stage} {ahead}"]
        assert (found["last"]["step"], found["last"]["passes"], found["last"]["idle_passes"]) == (2, 3, 3)
        assert found["micro_steps"] == 7

    def test_hide_no_boundary_from_any_rank(self, two_ranks, stage, ahead):
        assert two_ranks.results["skipped_idle"][f"{stage} {ahead}"]["steps"] == [[[1], [1]], [[1], [1]]]


def test_a_stream_may_say_itself_where_it_is_idle(two_ranks, stage):
    """Handed out: a window's first, skipped or run the second, then a real one that closes it; the last one opens a window."""
    found = two_ranks.results["explicit_idle"][stage]
    assert found["equal"]
    assert found["handed"] == ([4, 3] if stage in "01" else [4, 4])
    assert found["steps"] == [[1], [1]]


class TestOnlineStreams:
    def test_without_look_ahead_nothing_is_asked_for_before_the_pass_before_it_has_ended(self, two_ranks, stage):
        assert two_ranks.results["online"][stage]["asked"] == [[0, 1, 2, 3, 4, 5]] * 2

    def test_a_slow_rank_makes_no_difference(self, two_ranks, stage):
        assert two_ranks.results["online"][stage]["equal"]


class TestGroupAdvantages:
    def test_are_those_of_all_rollouts_in_one_list(self, two_ranks):
        found, expected = two_ranks.results["grpo"], group_advantages(PROMPTS, REWARDS)
        assert found["own"] == [expected[0::2], expected[1::2]]
        assert found["centred"][0] == group_advantages(PROMPTS, REWARDS, by_std=False)[0::2]
        assert found["own"][0] != group_advantages(PROMPTS[0::2], REWARDS[0::2]), "groups do lie on both ranks"

    def test_a_rank_may_have_none(self, two_ranks):
        assert two_ranks.results["grpo"]["alone"] == [group_advantages(PROMPTS, REWARDS), []]

    def test_a_rank_that_gives_too_few_is_named_on_every_rank(self, two_ranks):
        for said in two_ranks.results["grpo"]["short"]:
            assert said == "ConfigError: rank 1 of those that step together gave 2 rewards for 1 prompts"


class TestTurns:
    def test_that_give_their_shares_add_up_to_the_rollout(self, two_ranks, stage):
        found = two_ranks.results["turns_by_share"][stage]
        assert found["difference"] < 1e-7
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)
        assert (found["passes"], found["rollouts"], found["idle"]) == ([2, 4], [4, 4], 0)

    def test_under_a_mean_over_rollouts_are_refused_by_name(self, two_ranks):
        said = two_ranks.results["turns_by_share"]["mean"]
        assert said.startswith("WindowError: a micro-batch of 3 loss tokens finishes 0 rollouts")
        assert "loss_weight 'token'" in said

    def test_that_end_with_no_rollout_finished_take_no_step_and_leave_nothing(self, two_ranks, stage):
        assert two_ranks.results["turns_that_end_open"][stage] == {"unmoved": True, "clean": True, "stepped": True}


@pytest.mark.parametrize("what", ["loss", "norm", "accuracy", "margin"])
def test_preferences_weighed_by_tokens_equal_the_whole_batch_in_plain_torch(two_ranks, stage, what):
    """The loss and the margin weigh tokens, the accuracy is a mean over pairs; several passes on two ranks."""
    found = two_ranks.results["preferences"][stage]
    engine, whole = found[what]
    assert engine == pytest.approx(whole, rel=2e-5)
    assert found["passes"] > 2
    assert 0 < found["accuracy"][1] < 1
    assert found["margin"][1] != pytest.approx(found["means"], rel=1e-2), "weights do make a difference here"


@pytest.mark.parametrize("ending", ["closed", "open"])
@pytest.mark.parametrize("stage", ["0", "1"])
def test_an_idle_pass_is_run_while_a_parameter_has_no_gradient(two_ranks, stage, ending):
    """ZeRO 1 reduces only parameters that have one: skipped, ranks would reduce other buckets (seen: connection reset)."""
    found = two_ranks.results["heads"][f"{stage} {ending}"]
    assert found["equal"]
    assert (
        found["handed"]
        == {
            "0 closed": [4, 2],  # the real passes
            "1 closed": [4, 3],  # and the first idle one, after which each parameter has a gradient
            "0 open": [3, 1],
            "1 open": [3, 2],
        }[f"{stage} {ending}"]
    )


MISUSE = {
    "contradicted": "WindowError: backward\\(\\) got {'rollouts': 7, 'tokens': 999} but passes\\(\\) has announced",
    "parts": "WindowError: a micro-batch of 9 loss tokens in 4 sequences finishes 2 rollouts",
    "owed": "WindowError: .*waits for its step",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_of_passes_is_refused_with_the_rule(two_ranks, case):
    assert re.match(MISUSE[case], two_ranks.results["misuse_of_passes"][case])


def test_a_step_that_is_owed_is_told_without_a_wait(two_ranks):
    assert two_ranks.results["misuse_of_passes"]["seconds"] < 15
