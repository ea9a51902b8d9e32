"""Windows on two ranks: where they end, and what becomes of those that are empty, idle, dropped or left open."""

import pytest
import torch
import torch.distributed as dist

from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, forward, listen, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def boundaries(folder):
    """Windows of 4 passes on each stage: where the boundary is, what LR every pass sees, what moved."""
    results = {}
    for stage in STAGES:
        engine = build(config(stage, passes=8))
        foretold, seen, rates, clocks = [], [], [], []
        for index in range(12):
            foretold.append(engine.is_gradient_accumulation_boundary())
            rates.append(engine.get_lr()[0])
            engine.backward(forward(engine, index))
            seen.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            clocks.append((engine.global_steps, engine.lr_scheduler.last_batch_iteration, engine.global_samples))
        results[stage] = {"foretold": foretold, "seen": seen, "rates": rates, "clocks": clocks}
    return results


class TestMotivatingCases:
    def test_boundaries_are_at_micro_steps_3_7_and_11_for_windows_of_4_and_never_at_0(self, two_ranks, stage):
        result = two_ranks.of(boundaries)[stage]
        assert [index for index, closed in enumerate(result["seen"]) if closed] == [3, 7, 11]
        assert result["foretold"] == result["seen"]

    def test_the_4_micro_batches_of_a_window_see_one_lr(self, two_ranks, stage):
        rates = two_ranks.of(boundaries)[stage]["rates"]
        windows = [rates[0:4], rates[4:8], rates[8:12]]
        assert all(len(set(window)) == 1 for window in windows)
        assert rates[4] < rates[8]

    def test_the_scheduler_moves_once_an_optimizer_step(self, two_ranks, stage):
        clocks = two_ranks.of(boundaries)[stage]["clocks"]
        assert [clock[:2] for clock in clocks[3::4]] == [[1, 0], [2, 1], [3, 2]]
        assert [clock[0] for clock in clocks] == [0] * 3 + [1] * 4 + [2] * 4 + [3]

    def test_global_samples_are_the_rollouts_consumed(self, two_ranks, stage):
        clocks = two_ranks.of(boundaries)[stage]["clocks"]
        assert [clock[2] for clock in clocks[3::4]] == [8, 16, 24]


@on_two_ranks
def all_idle(folder):
    """A window in which no rank has a rollout, at the end of the data."""
    said, stop_listening = listen()
    engine = build(config(1, passes=4))
    before = weights.vector(engine.module)
    for seed in range(2):
        engine.idle(forward(engine, seed))
        engine.step()
    engine.finish()
    stop_listening()
    unmoved = torch.equal(before, weights.vector(engine.module))
    return {"said": said.getvalue(), "unmoved": unmoved, "record": engine.last_step.model_dump()}


def test_a_window_of_idle_passes_alone_takes_no_step_and_says_so(two_ranks):
    result = two_ranks.of(all_idle)
    assert result["unmoved"]
    assert result["record"]["skipped"]
    assert (result["record"]["rollouts"], result["record"]["idle_passes"]) == (0, 4)
    assert "window 0 (2 passes, 0 rollouts) has a total of 0 rollout weight" in result["said"]


@on_two_ranks
def idle_nan(folder):
    """The same window with and without an idle pass whose forward gives NaN and inf."""
    results = {}
    for stage in STAGES:
        reached = []
        for bad in (None, float("nan"), float("inf")):
            engine = build(config(stage, passes=4))
            one_pass(engine, 1, rollouts=1)
            if bad is not None:
                returned = engine.idle(forward(engine, 2) * bad)
                engine.step()
            one_pass(engine, 3, rollouts=1)
            reached.append(weights.vector(engine.module))
        record = engine.last_step
        results[stage] = {
            "equal": [torch.equal(reached[0], other) for other in reached[1:]],
            "finite": bool(torch.isfinite(reached[1]).all()),
            "returned": float(returned),
            "idle_passes": record.idle_passes,
            "loss": record.loss,
        }
    return results


def test_an_idle_pass_contributes_nothing_also_where_its_forward_is_nan_or_inf(two_ranks, stage):
    result = two_ranks.of(idle_nan)[stage]
    assert result["equal"] == [True, True]
    assert result["finite"]
    assert result["returned"] == 0.0
    assert result["idle_passes"] == 2
    assert result["loss"] == result["loss"], "NaN reached the metrics"


@on_two_ranks
def empty_window(folder):
    """A window without loss tokens between two good ones; the schedule, and what is said."""
    results = {}
    for stage in STAGES:
        said, stop_listening = listen()
        engine = build(config(stage, passes=4, loss_weight="token"))
        before = weights.vector(engine.module)
        rates = [engine.get_lr()]
        for _ in range(2):
            one_pass(engine, 1, rollouts=1, tokens=0)
        skipped = engine.last_step
        unmoved = torch.equal(before, weights.vector(engine.module))
        rates.append(engine.get_lr())
        for _ in range(2):
            one_pass(engine, 2, rollouts=1, tokens=5)
        only = build(config(stage, passes=4, loss_weight="token"))
        for _ in range(2):
            one_pass(only, 2, rollouts=1, tokens=5)
        stop_listening()
        results[stage] = {
            "skipped": skipped.model_dump(),
            "unmoved": unmoved,
            "rates": rates,
            "said": said.getvalue(),
            "next": engine.last_step.model_dump(),
            "steps": engine.global_steps,
            "samples": engine.global_samples,
            "as_if_it_never_was": torch.equal(weights.vector(engine.module), weights.vector(only.module)),
        }
    return results


class TestAnEmptyWindow:
    def test_takes_no_step_and_is_recorded_as_skipped(self, two_ranks, stage):
        result = two_ranks.of(empty_window)[stage]
        assert result["unmoved"]
        assert result["skipped"]["skipped"]
        assert result["skipped"]["total"] == 0.0
        assert result["skipped"]["loss"] is None
        assert result["skipped"]["rollouts"] == 4
        assert result["skipped"]["idle_passes"] == 0

    def test_moves_neither_lr_nor_optimizer_steps_but_its_rollouts_count(self, two_ranks, stage):
        result = two_ranks.of(empty_window)[stage]
        assert result["rates"][0] == result["rates"][1]
        assert result["steps"] == 1
        assert result["samples"] == 8

    def test_says_what_to_look_for(self, two_ranks, stage):
        said = two_ranks.of(empty_window)[stage]["said"]
        assert "window 0 (2 passes, 4 rollouts) has a total of 0 token weight" in said
        assert "empty rollouts or masks" in said

    def test_leaves_nothing_in_the_next_window(self, two_ranks, stage):
        result = two_ranks.of(empty_window)[stage]
        assert result["as_if_it_never_was"]
        assert not result["next"]["skipped"]


@on_two_ranks
def drop(folder):
    """An open window at the end of the data, dropped; the next window holds nothing of it."""
    results = {}
    for stage in STAGES:
        said, stop_listening = listen()
        engine = build(config(stage, passes=4, last_window="drop"))
        before = weights.vector(engine.module)
        one_pass(engine, 1)
        engine.finish()
        unmoved = torch.equal(before, weights.vector(engine.module))
        for seed in (2, 3):
            one_pass(engine, seed)
        fresh = build(config(stage, passes=4))
        for seed in (2, 3):
            one_pass(fresh, seed)
        stop_listening()
        same = torch.equal(weights.vector(engine.module), weights.vector(fresh.module))
        results[stage] = {"unmoved": unmoved, "same": same, "said": said.getvalue(), "steps": engine.global_steps}
    return results


def test_a_dropped_window_leaves_nothing_behind(two_ranks, stage):
    result = two_ranks.of(drop)[stage]
    assert result["unmoved"]
    assert result["same"]
    assert result["steps"] == 1
    assert "its 2 rollouts are dropped" in result["said"]


@on_two_ranks
def last_window_error(folder):
    engine = build(config(2, passes=4, last_window="error"))
    one_pass(engine, 1)
    message = refusal(engine.finish)
    fine = build(config(2, passes=4, last_window="error"))
    for seed in (1, 2):
        one_pass(fine, seed)
    return {"open": message, "closed": refusal(fine.finish)}


def test_an_open_window_at_the_end_is_an_error_where_that_was_asked_for(two_ranks):
    result = two_ranks.of(last_window_error)
    assert "2 of 4 rollouts after 1 passes" in result["open"]
    assert result["open"].startswith("WindowError")
    assert result["closed"] == "nothing was raised"


@on_two_ranks
def overlapped_finish(folder):
    """An open window at the end under overlap_comm, beside the same window closed by its last backward."""
    results = {}
    for stage in (1, 2, 3):
        reached = []
        for passes in (20, 4):
            extended = config(stage, passes=passes)
            extended["zero_optimization"]["overlap_comm"] = True
            engine = build(extended)
            torch.manual_seed(dist.get_rank())
            for seed in range(2):
                one_pass(engine, 10 * dist.get_rank() + seed)
            if passes == 20:
                engine.finish()
            reached.append((weights.vector(engine.module), float(engine.get_global_grad_norm())))
        results[stage] = {
            "difference": float((reached[0][0] - reached[1][0]).abs().max()),
            "norms": [norm for _, norm in reached],
        }
    return results


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_window_ended_by_finish_is_the_window_ended_by_its_last_backward_also_with_overlap_comm(two_ranks, stage):
    result = two_ranks.of(overlapped_finish)[stage]
    assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-6)
    assert result["difference"] < 1e-7
