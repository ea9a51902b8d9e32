"""What two ranks did in tasks.py, held against what was promised."""

import re

import pytest

from ds_parity.trace import read_trace
from tests.distributed import cells

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[str(stage) for stage in cells.STAGES])
def stage(request):
    return request.param


class TestMotivatingCases:
    def test_boundaries_are_at_micro_steps_3_7_and_11_for_windows_of_4_and_never_at_0(self, two_ranks, stage):
        found = two_ranks.results["boundaries"][stage]
        assert [index for index, closed in enumerate(found["seen"]) if closed] == [3, 7, 11]
        assert found["foretold"] == found["seen"]

    def test_the_4_micro_batches_of_a_window_see_one_lr(self, two_ranks, stage):
        rates = two_ranks.results["boundaries"][stage]["rates"]
        windows = [rates[0:4], rates[4:8], rates[8:12]]
        assert all(len(set(window)) == 1 for window in windows)
        assert rates[4] < rates[8]

    def test_the_scheduler_moves_once_an_optimizer_step(self, two_ranks, stage):
        clocks = two_ranks.results["boundaries"][stage]["clocks"]
        assert [clock[:2] for clock in clocks[3::4]] == [[1, 0], [2, 1], [3, 2]]
        assert [clock[0] for clock in clocks] == [0] * 3 + [1] * 4 + [2] * 4 + [3]

    def test_global_samples_are_the_rollouts_consumed(self, two_ranks, stage):
        clocks = two_ranks.results["boundaries"][stage]["clocks"]
        assert [clock[2] for clock in clocks[3::4]] == [8, 16, 24]


def test_without_the_key_the_bare_engine_comes_back(two_ranks):
    assert two_ranks.results["bare_without_the_key"] == {"bare": True, "length": 4}


def test_an_unchanged_deepspeed_loop_runs(two_ranks):
    found = two_ranks.results["unchanged_loop"]
    assert found["isinstance"]
    assert found["optimizer"]
    assert found["boundaries"] == [False, True] * 4
    assert found["steps"] == 4
    assert found["lr"] == pytest.approx([0.1**5])


def test_the_configuration_may_come_with_the_arguments_which_stay_as_they_are(two_ranks):
    assert two_ranks.results["configuration_by_arguments"] == {"target": 4, "args": True}


def test_a_window_of_idle_passes_alone_takes_no_step_and_says_so(two_ranks):
    found = two_ranks.results["all_idle"]
    assert found["unmoved"]
    assert found["record"]["skipped"]
    assert (found["record"]["rollouts"], found["record"]["idle_passes"]) == (0, 4)
    assert "window 0 (2 passes, 0 rollouts) has a total of 0 rollout weight" in found["said"]


def test_an_idle_pass_contributes_nothing_also_where_its_forward_is_nan_or_inf(two_ranks, stage):
    found = two_ranks.results["idle_nan"][stage]
    assert found["equal"] == [True, True]
    assert found["finite"]
    assert found["returned"] == 0.0
    assert found["idle_passes"] == 2
    assert found["loss"] == found["loss"], "NaN reached the metrics"


class TestAnEmptyWindow:
    def test_takes_no_step_and_is_recorded_as_skipped(self, two_ranks, stage):
        found = two_ranks.results["empty_window"][stage]
        assert found["unmoved"]
        assert found["skipped"]["skipped"]
        assert found["skipped"]["total"] == 0.0
        assert found["skipped"]["loss"] is None
        assert found["skipped"]["rollouts"] == 4
        assert found["skipped"]["idle_passes"] == 0

    def test_moves_neither_lr_nor_optimizer_steps_but_its_rollouts_count(self, two_ranks, stage):
        found = two_ranks.results["empty_window"][stage]
        assert found["rates"][0] == found["rates"][1]
        assert found["steps"] == 1
        assert found["samples"] == 8

    def test_says_what_to_look_for(self, two_ranks, stage):
        said = two_ranks.results["empty_window"][stage]["said"]
        assert "window 0 (2 passes, 4 rollouts) has a total of 0 token weight" in said
        assert "empty rollouts or masks" in said

    def test_leaves_nothing_in_the_next_window(self, two_ranks, stage):
        found = two_ranks.results["empty_window"][stage]
        assert found["as_if_it_never_was"]
        assert not found["next"]["skipped"]


def test_a_dropped_window_leaves_nothing_behind(two_ranks, stage):
    found = two_ranks.results["drop"][stage]
    assert found["unmoved"]
    assert found["same"]
    assert found["steps"] == 1
    assert "its 2 rollouts are dropped" in found["said"]


def test_an_open_window_at_the_end_is_an_error_where_that_was_asked_for(two_ranks):
    found = two_ranks.results["last_window_error"]
    assert "2 of 4 rollouts after 1 passes" in found["open"]
    assert found["open"].startswith("WindowError")
    assert found["closed"] == "nothing was raised"


MISUSE = {
    "negative": "rollouts is -1: a count must be >= 0",
    "nan": "rollouts is nan: a count must be a whole number",
    "bool": "rollouts is True: a count must be a whole number",
    "scale": "scale_wrt_gas=False.*leave scale_wrt_gas out",
    "step first": "without a backward.*once after every backward",
    "boundary": "ds_parity owns the boundary; remove the call",
    "batch": "set gradient_accumulation_passes in the configuration",
    "micro": "pass rollouts= to backward",
    "coalesce": "ds_parity owns the boundary; remove it",
    "foretell": "before backward.*ask between backward",
    "save": "CheckpointError.*4 rollouts of 1 passes are pending.*finish",
    "twice": "waits for its step",
    "tuple": "got a tuple that is no loss",
    "no step in passes": "waits for its step",
    "no backward": "before the last had its backward.*left out of the stream",
    "two backwards": "had its backward\\(\\) already",
    "foretell in passes": "between two micro-batches of passes",
    "finish": "call step\\(\\) first",
    "no tokens": "without tokens=.*pass tokens=",
    "rollouts only": "rollouts=1.*loss_weight is 'token'",
    "no prompts": "without prompts=.*pass prompts=",
    "prompts left out": "rollouts=4.*without prompts=.*count is 'prompt'.*0 where their other rollouts are still to come",
    "overshoot": "4 rollouts, 1 more than its target of 3.*choose 'carry' or 'reset'",
    "stuck": "1 of 2 ranks have no micro-batch at all.*idle=micro_batch",
    "no_sync": "inside no_sync.*leave no_sync",
    "plateau": "ReduceLROnPlateau.*choose 'optimizer_step'",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_with_the_rule_and_the_way_out(two_ranks, case):
    assert re.search(MISUSE[case], two_ranks.results["misuse"][case], re.DOTALL)


def test_ranks_that_part_are_told_on_every_rank(two_ranks):
    for message in (told["pass count"] for told in two_ranks.results["desync"]):
        assert message.startswith("RankDesyncError: ranks are not in the same place: rank 0 runs a pass")
        assert "rank 1 finishes" in message
        assert "idle()" in message


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("settings", 'ds_parity.overshoot (rank 0 has "carry"; rank 1 has "reset")'),
        ("stage", "zero_optimization.stage (rank 0 has 1; rank 1 has 2)"),
        ("lookahead", "look-ahead (rank 0 has 2; rank 1 has 3)"),
    ],
)
def test_ranks_that_were_told_different_things_are_told_so_on_every_rank(two_ranks, case, what):
    for message in (told[case] for told in two_ranks.results["desync"]):
        assert message.startswith(f"RankDesyncError: ranks differ in {what}. All ranks need the same configuration")


def test_ranks_may_log_what_and_where_they_like(two_ranks):
    assert [theirs["own"] for theirs in two_ranks.results["desync"]] == ["nothing was raised"] * 2


@pytest.mark.parametrize(
    ("case", "odd", "says"),
    [("fault", 1, 'ConfigError: .*overshoot = "cary"'), ("trace", 0, "TraceError: .*/dev/null/trace")],
)
def test_a_rank_that_cannot_start_tells_the_others(two_ranks, case, odd, says):
    told = [theirs[case] for theirs in two_ranks.results["desync"]]
    assert re.match(says, told[odd], re.DOTALL)
    others = f"RankDesyncError: this rank stops because others did: rank {odd} raised {says}"
    assert re.match(others, told[1 - odd], re.DOTALL)


@pytest.mark.parametrize(
    "case", ["refuses, ZeRO 1", "refuses, ZeRO 2", "refuses, ZeRO 3", "breaks, ZeRO 1", "breaks, ZeRO 3"]
)
def test_a_rank_that_raises_alone_in_passes_tells_the_others_long_before_the_limit(two_ranks, case):
    (message, _), (own, seconds) = [theirs[case] for theirs in two_ranks.results["desync"]]
    says = (
        "WindowError: a micro-batch of 3 loss tokens finishes 0"
        if "refuses" in case
        else "TraceError: the stream broke"
    )
    assert own.startswith(says)
    stopped = "RankDesyncError: this rank stops because another did: rank 0 runs a pass in window 0, pass "
    assert message.startswith(stopped + ("0" if "ZeRO 3" in case else "1"))  # read ahead, on ZeRO 3
    assert f"rank 1 has raised {says}" in message
    assert seconds < 20


def test_a_generator_that_is_closed_late_leaves_the_newer_one_alone(two_ranks):
    assert two_ranks.results["late_close"] == {"taken": 3, "passes": 4}


def test_methods_that_return_the_module_return_the_proxy(two_ranks):
    assert two_ranks.results["proxy_methods"] == {"kept": [True] * 3, "weights": True}


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_window_ended_by_finish_is_the_window_ended_by_its_last_backward_also_with_overlap_comm(two_ranks, stage):
    found = two_ranks.results["overlapped_finish"][stage]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6)
    assert found["difference"] < 1e-7


def test_a_silent_rank_ends_the_wait_when_the_time_is_up(two_ranks):
    found = two_ranks.results["silence_of_a_rank"]
    assert found["message"].startswith("RankDesyncError: rank 0 waited in runs a pass, window 0, pass 0")
    assert "up to 2.5 s" in found["message"]
    assert 2 < found["seconds"] < 10


class TestOverhead:
    def test_one_host_collective_a_pass(self, two_ranks, stage):
        assert two_ranks.results["overhead"][stage]["exchanges"] == 6

    def test_with_look_ahead_one_for_all_its_passes_and_two_to_end(self, two_ranks, stage):
        """Six passes, the answer that all streams are dry, and that all ranks finish."""
        assert two_ranks.results["overhead"][stage]["ahead"] == 3

    def test_no_tensor_is_read_that_the_bare_engine_does_not_read(self, two_ranks, stage):
        """Reading a tensor of the accelerator waits for it."""
        found = two_ranks.results["overhead"][stage]
        reads = ("item", "__bool__", "__float__", "__int__")
        assert {name: found["ours"][name] for name in reads} == {name: found["bare"][name] for name in reads}

    def test_collectives_beyond_the_bare_engine_are_the_exchanges_and_one_for_the_loss(self, two_ranks, stage):
        found = two_ranks.results["overhead"][stage]
        more = {name: found["ours"][name] - count for name, count in found["bare"].items()}
        assert {name: count for name, count in more.items() if count} == {"isend": 6 + 1, "recv": 6 + 1}


class TestNominalProgress:
    def test_is_fractional_for_lambda_lr(self, two_ranks):
        """Windows of 6, 6, 6 and 2 rollouts towards 4: progress 1.5, 3, 4.5, 5."""
        assert two_ranks.results["torch_schedulers"]["lambda"] == pytest.approx([2.5, 4.0, 5.5, 6.0])

    def test_takes_whole_steps_and_carries_the_remainder_for_other_schedulers(self, two_ranks):
        assert two_ranks.results["torch_schedulers"]["step"] == pytest.approx([2**-1, 2**-3, 2**-4, 2**-5])

    def test_stands_one_behind_for_deepspeed_schedulers(self, two_ranks):
        assert two_ranks.results["torch_schedulers"]["deepspeed"] == 4


def test_the_trace_key_leaves_a_trace(two_ranks):
    found = two_ranks.results["trace_key"]
    trace = read_trace(found["path"])
    assert [step.rollouts for step in trace.steps] == [4, 4]
    assert trace.header.engine == "ds_parity"
    last = trace.steps[-1].model_dump()
    assert {**last, "lr": list(last["lr"])} == found["last"]
