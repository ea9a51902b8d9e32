"""Saving and loading inside a window, and under other targets and schedules."""

import re

import pytest
import torch

from tests.distributed.cells import STAGES, config
from tests.distributed.continuing import stands, windows_of
from tests.distributed.engines import build, forward, ledger_of, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def into_windows(folder):
    """Save and load inside a window; load weights alone, under another target or LR progress, and from nowhere."""
    results = {}
    for stage in STAGES:
        extended = config(stage, passes=8, lr_progress="rollout")
        path = f"{folder}/{stage}"
        engine = build(extended)
        nothing = engine.load_checkpoint(f"{folder}/nowhere")
        windows_of(engine, [3, 3, 1])
        refused = refusal(lambda engine=engine, path=path: engine.save_checkpoint(path))
        engine.backward(forward(engine, 5), rollouts=3)
        owed = refusal(lambda engine=engine, path=path: engine.save_checkpoint(path))
        engine.step()
        engine.save_checkpoint(path)
        reached = []
        for dirty in (False, True):
            other = build(extended)
            if dirty:
                windows_of(other, [3, 3, 3, 1])
                open_passes = other.window.passes
                other.load_checkpoint(f"{folder}/nowhere")
                kept = other.window.passes
            _, state = other.load_checkpoint(path)
            reached.append(windows_of(other, [2, 1, 3]))
        # Two steps later, with what DeepSpeed had put into it.
        other.save_checkpoint(path, "again", {**state, "mine": 1}, False)
        other_target = build(config(stage, passes=6))
        # Refused on ZeRO 3: test_changing_parameters.py.
        if stage != 3:
            other_target.load_checkpoint(path, load_module_only=True)
        alone = [other_target.global_samples, other_target.window.index]
        message = refusal(lambda other=other_target, path=path: other.load_checkpoint(path))
        by_step = build(config(stage, passes=8))
        progress = refusal(lambda other=by_step, path=path: other.load_checkpoint(path))
        by_step.load_checkpoint(path, load_lr_scheduler_states=False)
        kept_schedule = build(extended)
        windows_of(kept_schedule, [3, 3])
        kept_schedule.load_checkpoint(path, load_lr_scheduler_states=False)
        results[stage] = {
            "nothing": nothing,
            "refused": [refused, owed],
            "clean": reached[0],
            "dirty": reached[1],
            "nowhere": [open_passes, kept],
            "state": sorted(state["ds_parity"]),
            "other target": message,
            "weights alone": alone,
            "other progress": progress,
            "own progress": ledger_of(kept_schedule).progress.nominal,
        }
        again = build(extended)
        _, state = again.load_checkpoint(path, "again")
        results[stage]["again"] = [state["mine"], stands(again) == stands(other)]
        results[stage]["again"].append(windows_of(again, [3, 3]) == windows_of(other, [3, 3]))
    return results


class TestInsideAWindow:
    def test_saving_is_refused_with_what_is_pending(self, two_ranks, stage):
        """Four rollouts of the window's eight were carried over from the last one."""
        pending, owed = two_ranks.of(into_windows)[stage]["refused"]
        assert re.match(r"CheckpointError: save_checkpoint\(\) inside window 1: 2 rollouts of 1 passes", pending)
        assert "(at 4 rollouts), or call finish() first" in pending
        assert "8 rollouts of 2 passes are pending" in owed

    def test_loading_throws_the_open_window_away(self, two_ranks, stage):
        result = two_ranks.of(into_windows)[stage]
        assert result["dirty"] == result["clean"]
        assert [step["step"] for step, *_ in result["clean"]] == [3, 4]

    def test_it_stays_where_there_is_nothing_to_load(self, two_ranks, stage):
        result = two_ranks.of(into_windows)[stage]
        assert result["nothing"] == [None, None]
        assert result["nowhere"] == [1, 1]


class TestLoading:
    def test_weights_alone_leaves_the_counts(self, two_ranks, stage):
        assert two_ranks.of(into_windows)[stage]["weights alone"] == [0, 0]

    def test_towards_another_target_is_refused(self, two_ranks, stage):
        message = two_ranks.of(into_windows)[stage]["other target"]
        assert "target of 8 rollouts, this configuration says 6 rollouts" in message

    def test_under_another_lr_progress_is_refused_unless_the_schedule_stays_as_it_is(self, two_ranks, stage):
        result = two_ranks.of(into_windows)[stage]
        assert "lr_progress was 'rollout', this configuration says 'optimizer_step'" in result["other progress"]
        assert "load_lr_scheduler_states=False" in result["other progress"]
        assert result["own progress"] == 1.5

    def test_what_was_loaded_can_be_saved_again(self, two_ranks, stage):
        assert two_ranks.of(into_windows)[stage]["again"] == [1, True, True]


SCHEDULERS = {
    "WarmupCosineLR": {"total_num_steps": 40, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 5},
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=50),
}


@on_two_ranks
def schedulers(folder):
    """Runs that are continued under other schedulers: after 3 steps, nominal progress 4.5, a surplus of 4 pending."""
    results = {}
    cells = [(name, "rollout") for name in SCHEDULERS] + [(name, "optimizer_step") for name in list(SCHEDULERS)[2:]]
    for stage, (name, progress) in enumerate(cells):
        made = config(stage % 4, passes=8, optimizer="AdamW", lr_progress=progress)
        scheduler = SCHEDULERS[name]
        keywords = {}
        if callable(scheduler):
            del made["scheduler"]
            keywords["lr_scheduler"] = scheduler
        else:
            made["scheduler"] = {"type": name, "params": scheduler}
        engine = build(made, **keywords)
        windows_of(engine, [3, 3, 9, 3])
        engine.save_checkpoint(f"{folder}/{name}-{progress}")
        whole = windows_of(engine, [2, 3, 1, 3])
        other, resumed = build(made, **keywords), []
        for _ in range(2):
            other.load_checkpoint(f"{folder}/{name}-{progress}")
            resumed.append(windows_of(other, [2, 3, 1, 3]) == whole)
        results[f"{name}, {progress}"] = {"rates": [step["lr"][0] for step, *_ in whole], "alike": resumed}
    return results


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_goes_on_bit_for_bit_under_other_schedulers(two_ranks, scheduler):
    result = two_ranks.of(schedulers)
    by_rollout = result[f"{scheduler}, rollout"]
    assert by_rollout["alike"] == [True, True]
    assert len(set(by_rollout["rates"])) == len(by_rollout["rates"]) > 1, "a schedule that stands still proves nothing"
    by_step = result.get(f"{scheduler}, optimizer_step")
    if by_step is not None:
        assert by_step["alike"] == [True, True]
        assert by_step["rates"] != by_rollout["rates"]
