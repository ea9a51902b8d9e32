"""States that leave the accelerator inside a window and come back: the steps are those of an engine that keeps them."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.running import weights
from tests.distributed import test_pipelines as pipelines
from tests.distributed.cells import config
from tests.distributed.engines import build, forward, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_pipelines import alone_in_the_process

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# On ZeRO 3 DeepSpeed moves the states of its own Adam alone.
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.05}}, "scheduler": None}
PRECISIONS = {"fp32": {}, "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}
TORCH_ADAM = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def can_pin():
    """Whether memory can be pinned: before 0.19.8 DeepSpeed asks torch, which does so beside an accelerator alone."""
    return torch.accelerator.is_available() or not before(release("0.19.8"))


def config_of(stage, keys, **zero):
    extended = {**config(stage, passes=6), **ADAM, **keys, "zero_optimization": {"stage": stage, **zero}}
    del extended["scheduler"]
    return extended


def trained(stage, keys, moves, **zero):
    engine = build(config_of(stage, keys, **zero))
    for seed in range(9):
        one_pass(engine, seed)
        if moves:
            engine.offload_states(pin_memory=can_pin() and seed % 2 == 0)
            engine.reload_states()
    vector, step = weights.vector(engine.module).tolist(), engine.last_step.step
    engine.destroy()
    return vector, step


@at_length_on_two_ranks
def moved_inside(folder):
    """Three windows of three passes, with and without moving states behind every pass."""
    return {
        f"{stage}-{name}": [trained(stage, keys, moves) for moves in (False, True)]
        for stage in (1, 2, 3)
        for name, keys in PRECISIONS.items()
    }


@at_length_on_two_ranks
def offloaded_states_moved(folder):
    """The same where the optimizer's states lie on the host all the time; releases before 0.19.0 refuse it."""
    return {
        str(stage): [trained(stage, TORCH_ADAM, moves, **OFFLOADED) for moves in (False, True)] for stage in (1, 2, 3)
    }


@at_length_on_two_ranks
def offloaded_parameters_moved(folder):
    """What a loop hears that would move states beside offloaded parameters, and whether it can train on."""
    engine = build(config_of(3, TORCH_ADAM, offload_param={"device": "cpu"}, **OFFLOADED))
    for seed in range(3):
        one_pass(engine, seed)
    said = refusal(lambda: engine.offload_states(pin_memory=False))
    engine.reload_states()
    for seed in range(3):
        one_pass(engine, seed)
    step = engine.last_step.step
    engine.destroy()
    return said, step


@at_length_on_two_ranks
def of_another_optimizer_moved(folder):
    """What a loop hears on ZeRO 3 with torch's Adam, and how many steps it takes after that."""
    engine = build(config_of(3, TORCH_ADAM))
    said = refusal(lambda: engine.offload_states(pin_memory=False))
    for seed in range(3):
        one_pass(engine, seed)
    step = engine.last_step.step
    engine.destroy()
    return said, step


@at_length_on_two_ranks
def left_away(folder):
    """By stage and who moves states away, behind a step or behind a backward: what each rank hears."""
    results = {}
    for stage in (1, 2, 3):
        # On ZeRO 3 one rank alone would gather weights in its forward, for which the other one doesn't come.
        for name, ranks in {"all": (0, 1), **({"the first": (0,)} if stage < 3 else {})}.items():
            engine = build(config_of(stage, {}))
            for seed in range(3):
                one_pass(engine, seed)
            if dist.get_rank() in ranks:
                engine.offload_states(pin_memory=False)
            said = refusal(lambda: one_pass(engine, 3))  # noqa: B023
            results[f"{stage} {name}"] = from_all(said)
            engine.destroy()
        engine = build(config_of(stage, {}))
        for seed in range(2):
            one_pass(engine, seed)
        engine.backward(forward(engine, 2))
        engine.offload_states(pin_memory=False)
        results[f"{stage} behind a backward"] = from_all(refusal(engine.step))
        engine.destroy()
    return results


# What only a step needs.
OF_STEPS = {
    "optimizer's": (OffloadStateTypeEnum.optim_states,),
    "fp32 weights": (OffloadStateTypeEnum.hp_params,),
    "both": (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params),
}


def windows_of(engine, moved, forgets=False):
    """Three windows of three passes, through which states are away; what a loop hears that forgets them in one."""
    said = None
    for window in range(3):
        engine.offload_states(include=moved, pin_memory=False)
        for seed in range(3):
            engine.backward(forward(engine, 3 * window + seed))
            if seed < 2:
                engine.step()
        if forgets and window == 1:
            said = refusal(engine.step)
        engine.reload_states()
        engine.step()
    vector, step = weights.vector(engine.module).tolist(), engine.last_step.step
    engine.destroy()
    return (vector, step), from_all(said)


@at_length_on_two_ranks
def away_in_passes(folder):
    """By stage and states: without a move, with them away in passes, what a step without them says, and behind it."""
    results = {}
    for stage in (1, 2, 3):
        kept, _ = windows_of(build(config_of(stage, {})), ())
        for name, moved in OF_STEPS.items():
            away, _ = windows_of(build(config_of(stage, {})), moved)
            behind, forgotten = windows_of(build(config_of(stage, {})), moved, forgets=True)
            results[f"{stage} {name}"] = [kept, away, forgotten, behind]
    return results


@at_length_on_two_ranks
@alone_in_the_process
def away_in_a_pipeline(folder):
    """Weights of a stage behind three windows; what one without its states says, and weights of a loop that goes on."""

    def trained_pipeline(forgets):
        engine, said = pipelines.build(pipelines.config(1, optimizer=ADAM["optimizer"])), None
        for window in range(3):
            if forgets and window == 1:
                engine.offload_states(pin_memory=False)
                said = refusal(lambda: engine.train_window(pipelines.micro_batches(engine, 1, [[2, 1]])))
                engine.reload_states()
            engine.train_window(pipelines.micro_batches(engine, window, [[2, 1]]))
        vector = from_all(weights.vector(engine.module).tolist())
        deepspeed.utils.groups.mpu = None
        return vector, from_all(said)

    kept, _ = trained_pipeline(forgets=False)
    behind, said = trained_pipeline(forgets=True)
    return kept, said, behind


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_pass_without_the_states_that_were_moved_away_says_so(two_ranks_at_length, stage):
    results = two_ranks_at_length.of(left_away)
    wanted = "WindowError: {} of window {} while offload_states() has moved states away that it needs ("
    for said in results[f"{stage} all"]:
        assert said.startswith(wanted.format("a pass", 1)), said
        assert said.endswith("call engine.reload_states() before it")
    if stage < 3:
        first, second = results[f"{stage} the first"]
        assert first.startswith(wanted.format("a pass", 1)), first
        assert second.startswith("RankDesyncError: this rank stops because another did: rank 0 has raised"), second
    for said in results[f"{stage} behind a backward"]:
        assert said.startswith(wanted.format("the step", 0)), said


@pytest.mark.parametrize("moved", OF_STEPS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_passes_run_while_what_only_a_step_needs_is_away(two_ranks_at_length, stage, moved):
    kept, away, forgotten, behind = two_ranks_at_length.of(away_in_passes)[f"{stage} {moved}"]
    assert away == kept
    for said in forgotten:
        assert said.startswith("WindowError: the step of window 1 while offload_states() has moved states away"), said
    assert behind == kept, "the step comes again behind reload_states()"


def test_a_pipeline_without_states_that_were_moved_away_says_so(two_ranks_at_length):
    kept, said, behind = two_ranks_at_length.of(away_in_a_pipeline)
    for one in said:
        assert one.startswith("WindowError: the step of window 1 while offload_states() has moved states away"), one
    assert behind == kept, "nothing has run, and the window comes again"


def test_states_of_another_optimizer_are_refused_on_stage_3(two_ranks_at_length):
    said, step = two_ranks_at_length.of(of_another_optimizer_moved)
    assert said.startswith(
        "ConfigError: offload_states() on ZeRO stage 3: DeepSpeed moves the states of its own FusedAdam"
    )
    assert "leave the call out" in said
    assert step == 1


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_states_that_are_offloaded_anyway_may_be_moved(two_ranks_at_length, stage):
    kept, moved = two_ranks_at_length.of(offloaded_states_moved)[stage]
    assert moved == kept
    assert moved[1] == 3


def test_offloaded_parameters_are_refused_with_the_way_out(two_ranks_at_length):
    said, step = two_ranks_at_length.of(offloaded_parameters_moved)
    assert said.startswith("ConfigError: offload_states() with zero_optimization.offload_param.device = cpu: ")
    assert "leave the call out" in said
    assert step == 2


@pytest.mark.parametrize("name", [f"{stage}-{name}" for stage in (1, 2, 3) for name in PRECISIONS])
def test_states_that_are_moved_inside_a_window_change_no_step(two_ranks_at_length, name):
    kept, moved = two_ranks_at_length.of(moved_inside)[name]
    assert moved == kept
    assert moved[1] == 3
