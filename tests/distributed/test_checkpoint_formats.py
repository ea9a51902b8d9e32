"""Checkpoints of bare DeepSpeed, and what DeepSpeed's own tools convert and do not convert."""

import functools
import re
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.config import rewrite
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import installed
from ds_parity.parity.running import weights
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.cells import STAGES, config
from tests.distributed.continuing import converted, extended, fp32_weights, stands, windows_of
from tests.distributed.engines import build, forward, from_all, listen, one_pass, perceptron
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# By which a part of a checkpoint is asked for.
PARTS = {"load_optimizer_states": False, "load_module_only": True}


@at_length_on_two_ranks
def by_command(folder):
    """What DeepSpeed's documentation names: the converter's command, and the script that lies beside a checkpoint."""
    made = extended(2, "fp32", {}, loss_weight="rollout")
    engine = build(made)
    windows_of(engine, [3, 3])
    engine.save_checkpoint(folder)
    masters = fp32_weights(engine)
    dist.barrier()
    said = from_all(_command(folder) if dist.get_rank() == 0 else _script(folder))
    state = torch.load(f"{folder}/fp32/pytorch_model.bin")
    other = build({**made, "checkpoint": {"load_universal": True}})
    path, _ = other.load_checkpoint(folder)
    return {
        "said": said,
        "script": all(torch.equal(state[name], master) for name, master in masters.items()),
        "path": path,
        "stands": stands(other) == stands(engine),
        "same": torch.equal(weights.vector(engine.module), weights.vector(other.module)),
    }


def _command(folder):
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", f"{folder}/global_step1", "--output_folder", f"{folder}/universal"]
    module = ["-m", "deepspeed.checkpoint.ds_to_universal"]
    done = subprocess.run([sys.executable, *module, *folders, *options], capture_output=True, text=True, check=False)
    return [done.returncode, done.stderr[-2000:] if done.returncode else ""]


def _script(folder):
    # As a command it writes shards, with a package that DeepSpeed doesn't depend on.
    script = runpy.run_path(f"{folder}/zero_to_fp32.py")
    script["convert_zero_checkpoint_to_fp32_state_dict"](folder, f"{folder}/fp32", max_shard_size=None)
    return [0, ""]


@at_length_on_two_ranks
def not_converted(folder):
    """Checkpoints that DeepSpeed's converter does not know, with its message."""
    results = {}
    for name, made in (
        ("ZeRO 0", config(0, "fp32", 4, "AdamW")),
        ("SGD", config(1, "fp32", 4)),
        ("SGD 3", config(3, "fp32", 4)),
    ):
        engine = build(made)
        for seed in range(2):
            one_pass(engine, seed)
        engine.save_checkpoint(f"{folder}/{name}")
        results[name] = converted(f"{folder}/{name}", 1)
    return results


@at_length_on_two_ranks
def universal_elsewhere(folder):
    """What loading a universal checkpoint of ZeRO 2 and of 3 ends in, on every stage."""
    results = {}
    for saved in (2, 3):
        engine = build(extended(saved, "fp32", {}, loss_weight="rollout"))
        windows_of(engine, [3, 3])
        engine.save_checkpoint(f"{folder}/{saved}")
        if saved == 2:
            results["not converted"] = from_all(_ended(build(_universal(1)), f"{folder}/2"))
        converted(f"{folder}/{saved}", 1)
        for stage in STAGES:
            results[f"{saved} on {stage}"] = from_all(_ended(build(_universal(stage)), f"{folder}/{saved}"))
        for stage, (flag, value) in product((1, 2) if saved == 2 else (3,), PARTS.items()):
            other = build(_universal(stage))
            said = _ended(other, f"{folder}/{saved}", **{flag: value})
            alike = torch.equal(weights.vector(engine.module), weights.vector(other.module))
            results[f"{flag} on {stage}"] = from_all([said, alike, len(other.optimizer.optimizer.state)])
        if saved == 3:
            # The folder of the universal checkpoint may be all that was copied.
            dist.barrier()
            if dist.get_rank() == 0:
                Path(folder, "3", "latest").unlink()
            dist.barrier()
            said = _ended(build(_universal(3)), f"{folder}/3", load_optimizer_states=False)
            results["alone without latest"] = from_all(said)
    return results


def _universal(stage):
    return {**extended(stage, "fp32", {}, loss_weight="rollout"), "checkpoint": {"load_universal": True}}


def _ended(engine, path, **options):
    """What loading ends in, also where it is none of our errors."""
    try:
        engine.load_checkpoint(path, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


class TestConversion:
    def test_by_command_and_the_script_beside_the_checkpoint(self, two_ranks_at_length):
        result = two_ranks_at_length.of(by_command)
        assert result["said"] == [[0, ""], [0, ""]]
        assert result["script"]
        assert result["stands"]
        assert result["same"]
        assert "universal" in result["path"]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("ZeRO 0", "can't find \\*_optim_states.pt"),
            ("SGD", "KeyError: 'exp_avg'"),
            ("SGD 3", "KeyError: 'exp_avg'"),
        ],
    )
    def test_what_deepspeed_does_not_convert(self, two_ranks_at_length, name, said):
        assert re.search(said, two_ranks_at_length.of(not_converted)[name])

    @pytest.mark.parametrize("saved", [2, 3])
    @pytest.mark.parametrize("stage", STAGES)
    def test_a_universal_checkpoint_is_loaded_on_its_stage_and_refused_on_others(
        self, two_ranks_at_length, saved, stage
    ):
        fits = stage in ((1, 2) if saved == 2 else (3,))
        for said in two_ranks_at_length.of(universal_elsewhere)[f"{saved} on {stage}"]:
            assert said == "loaded" if fits else said.startswith("CheckpointError: load_checkpoint("), said
            assert fits or "on the stage that saved it, where 1 and 2 are alike" in said

    @pytest.mark.parametrize("flag", PARTS)
    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_part_of_a_universal_checkpoint_is_refused_where_all_would_be_loaded(
        self, two_ranks_at_length, stage, flag
    ):
        for said, loaded, _ in two_ranks_at_length.of(universal_elsewhere)[f"{flag} on {stage}"]:
            assert said.startswith(
                f"CheckpointError: load_checkpoint({flag}={PARTS[flag]}) on ZeRO stage {stage}, with"
            )
            assert not loaded

    def test_weights_of_a_universal_checkpoint_are_loaded_alone_on_stage_3_or_refused(self, two_ranks_at_length):
        """DeepSpeed before 0.19.3 loads the optimizer's states, too."""
        here = installed()
        for said, loaded, states in two_ranks_at_length.of(universal_elsewhere)["load_optimizer_states on 3"]:
            if here is not None and here < release("0.19.3"):
                assert said.startswith("CheckpointError: load_checkpoint(load_optimizer_states=False) on ZeRO stage 3")
                assert not loaded
            else:
                assert (said, loaded, states) == ("loaded", True, 0)

    def test_weights_of_a_universal_checkpoint_need_no_file_latest(self, two_ranks_at_length):
        here = installed()
        refused = here is not None and here < release("0.19.3")
        for said in two_ranks_at_length.of(universal_elsewhere)["alone without latest"]:
            assert said.startswith("CheckpointError: load_checkpoint(load_opt") if refused else said == "loaded"

    def test_a_checkpoint_that_was_not_converted_is_no_universal_one(self, two_ranks_at_length):
        for said in two_ranks_at_length.of(universal_elsewhere)["not converted"]:
            assert said.startswith("CheckpointError: load_checkpoint("), said
            assert "ds_to_universal" in said


@at_length_on_two_ranks
def clipped_by_its_own(folder):
    """By stage and precision: how far a step at a rate of 1 goes, clipped to 0.5, from a checkpoint clipped to 2."""
    results = {}
    with fp16_allowed():
        for stage, precision in product(STAGES, PRECISIONS):
            saved, again = (_clipped(stage, precision, limit) for limit in (2.0, 0.5))
            saved.save_checkpoint(f"{folder}/{stage}-{precision}")
            dist.barrier()
            again.load_checkpoint(f"{folder}/{stage}-{precision}")
            before = weights.vector(again.module)
            rows = torch.ones(1, 4, device=again.device, dtype=PRECISIONS[precision])
            again.backward(again(rows).float().sum() * 8, rollouts=1)
            again.step()
            results[f"{stage} {precision}"] = float((weights.vector(again.module) - before).norm())
            saved.destroy()
            again.destroy()
    return results


def _clipped(stage, precision, limit):
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "gradient_clipping": limit,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        made[precision] = {"enabled": True, **({"loss_scale": 1.0} if precision == "fp16" else {})}
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=made)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_clipped_as_the_configuration_says_that_loads(two_ranks_at_length, stage, precision):
    assert two_ranks_at_length.of(clipped_by_its_own)[f"{stage} {precision}"] == pytest.approx(
        0.5, rel=4e-3
    )  # 2 ** -8 in bf16


PROGRESS = ("optimizer_step", "rollout")


@at_length_on_two_ranks
def schedules_that_were_not_saved(folder):
    """By stage, scheduler and progress: what loading a checkpoint of a run without one ends in, and with the way out.

    "another": the run had one of DeepSpeed's, and LambdaLR loads it.
    """
    results = {}
    for stage, progress in product(STAGES, PROGRESS):
        made = config(stage, passes=4, lr_progress=progress)
        without = {key: value for key, value in made.items() if key != "scheduler"}
        for saved, begun in (("none", without), ("another", made)):
            engine = build(begun)
            windows_of(engine, [2, 2])
            engine.save_checkpoint(f"{folder}/{stage}-{progress}-{saved}")
        dist.barrier()
        own = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_constant)
        loads = {"WarmupLR": lambda: build(made), "LambdaLR": lambda: build(without, lr_scheduler=own)}  # noqa: B023
        for name, saved in (("WarmupLR", "none"), ("LambdaLR", "none"), ("LambdaLR", "another")):
            path = f"{folder}/{stage}-{progress}-{saved}"
            said, other = _ended(loads[name](), path), loads[name]()
            begins = _ended(other, path, load_lr_scheduler_states=False)
            windows_of(other, [2, 2])
            results[f"{stage} {name} {saved} {progress}"] = from_all([said, begins, other.get_lr()[0]])
    return results


def _in_turns(stage):
    return {**_states(stage, "fp32"), "zero_optimization": {"stage": stage, "round_robin_gradients": True}}


def _states(stage, precision, optimizer="AdamW"):
    made = extended(stage, precision, {}, loss_weight="rollout")
    return made if optimizer == "AdamW" else {**config(stage, optimizer=optimizer), "ds_parity": made["ds_parity"]}


def _small(stage):
    return {**_states(stage, "fp32"), "zero_optimization": {"stage": stage, "sub_group_size": 8}}


# By name: how a run was saved, how it is loaded, the stages, and what is said of it.
ELSEWHERE = {
    "bf16": (lambda s: _states(s, "fp32"), lambda s: _states(s, "bf16"), STAGES, "was saved in another precision"),
    "fp32": (lambda s: _states(s, "bf16"), lambda s: _states(s, "fp32"), STAGES, "was saved in another precision"),
    "in turns": (lambda s: _states(s, "fp32"), _in_turns, (1, 2), "= false, and this configuration says true"),
    "not in turns": (_in_turns, lambda s: _states(s, "fp32"), (1, 2), "= true, and this configuration says false"),
    "sub-groups": (lambda s: _states(s, "fp32"), _small, (3,), "the zero_optimization.sub_group_size"),
    "optimizer": (
        lambda s: _states(s, "fp32"),
        lambda s: _states(s, "fp32", "SGD"),
        STAGES,
        "another optimizer than this",
    ),
}
ELSEWHERE_AT = [(name, stage) for name, (_, _, stages, _) in ELSEWHERE.items() for stage in stages]


@at_length_on_two_ranks
def states_kept_otherwise(folder):
    """What loading ends in where the optimizer's states are kept otherwise, and with the way out that is named."""
    results = {}
    for number, (name, stage) in enumerate(ELSEWHERE_AT):
        saved, loads, _, _ = ELSEWHERE[name]
        engine = build(saved(stage))
        rows = torch.ones(3, 4, device=engine.device, dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(rows).float().pow(2).mean(), rollouts=6)
        engine.step()
        path = f"{folder}/{number}"
        engine.save_checkpoint(path)
        said = _ended(build(loads(stage)), path)
        other = build(loads(stage))
        alone = _ended(other, path, load_optimizer_states=False)
        alike = torch.allclose(weights.vector(engine.module).float(), weights.vector(other.module).float(), atol=1e-2)
        assert engine.global_steps == 1
        results[f"{name} {stage}"] = from_all([said, alone, alike])
    return results


@pytest.mark.parametrize(("name", "stage"), ELSEWHERE_AT)
def test_states_that_are_kept_otherwise_are_refused_with_a_way_out(two_ranks_at_length, name, stage):
    for said, alone, alike in two_ranks_at_length.of(states_kept_otherwise)[f"{name} {stage}"]:
        assert said.startswith("CheckpointError: ")
        assert ELSEWHERE[name][3] in said
        assert "load_optimizer_states=False" in said
        assert alone == "loaded"
        assert alike


def _constant(step):
    return 1.0


@pytest.mark.parametrize("progress", PROGRESS)
@pytest.mark.parametrize(
    ("name", "saved", "why"),
    [
        ("WarmupLR", "none", "no state of an LR scheduler, and this configuration has one (WarmupLR). "),
        ("LambdaLR", "none", "no state of an LR scheduler, and this configuration has one (LambdaLR). "),
        ("LambdaLR", "another", "the state of another LR scheduler than this engine's LambdaLR, without 'lr_lambdas'"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_without_this_schedule_names_the_way_to_begin_one(
    two_ranks_at_length, stage, name, saved, why, progress
):
    cell = f"{stage} {name} {saved} {progress}"
    for said, loaded, rate in two_ranks_at_length.of(schedules_that_were_not_saved)[cell]:
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert why in said
        assert "load_lr_scheduler_states=False, which begins the schedule here" in said
        assert loaded == "loaded"
        assert rate > 0


@at_length_on_two_ranks
def bare(folder):
    """From bare DeepSpeed to ds_parity and back, four rollouts a step; what each engine's LR was, step by step."""
    results = {}
    for stage in STAGES:
        extended = config(stage, passes=4, lr_progress="rollout")
        first = build_bare(extended)
        for seed in range(10):
            first.backward(forward(first, seed))
            first.step()
        first.save_checkpoint(f"{folder}/bare-{stage}")
        rates = [first.get_lr()[0]]
        said, stop_listening = listen()
        engine = build(extended)
        engine.load_checkpoint(f"{folder}/bare-{stage}")
        stop_listening()
        loaded = torch.equal(weights.vector(first.module), weights.vector(engine.module))
        rates.append(engine.get_lr()[0])
        steps = windows_of(engine, [1, 1])
        rates.append(engine.get_lr()[0])
        windows_of(engine, [3])  # one and a half nominal steps
        rates.append(engine.get_lr()[0])
        engine.save_checkpoint(f"{folder}/ds_parity-{stage}")
        back = build_bare(extended)
        path, state = back.load_checkpoint(f"{folder}/ds_parity-{stage}")
        rates.append(back.get_lr()[0])
        for seed in range(2):
            back.backward(forward(back, seed))
            back.step()
        rates.append(back.get_lr()[0])
        uninterrupted = build_bare(extended)
        uninterrupted.load_checkpoint(f"{folder}/bare-{stage}")
        for seed in range(2):
            uninterrupted.backward(forward(uninterrupted, seed))
            uninterrupted.step()
        results[stage] = {
            "rates": rates,
            "said": said.getvalue(),
            "loaded": loaded,
            "step": [steps[0][0]["step"], steps[0][0]["rollouts"], engine.global_samples],
            "as bare": steps[0][1] == weights.summary(weights.vector(uninterrupted.module)).checksum,
            "back": [path is not None, "ds_parity" in state, back.global_steps],
        }
    return results


def build_bare(extended):
    """Bare DeepSpeed with what the extended configuration is rewritten to."""
    model = perceptron()
    plain = rewrite(extended, dist.get_world_size()).config
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    return engine


class TestBareDeepSpeed:
    def test_a_checkpoint_of_it_goes_on_in_ours_where_its_schedule_stood(self, two_ranks_at_length, stage):
        """Five steps of four rollouts on the bare engine, then one on ds_parity's, then one of six."""
        result = two_ranks_at_length.of(bare)[stage]
        assert result["loaded"]
        assert result["rates"][:4] == pytest.approx([0.025 + 0.0025 * at for at in (4, 4, 5, 6.5)])
        assert result["step"] == [6, 4, 30]
        assert result["as bare"]
        assert result["said"].count("the window starts fresh") == 1

    def test_ours_goes_on_in_it(self, two_ranks_at_length, stage):
        """At a fractional place of the schedule, a step further with every step."""
        result = two_ranks_at_length.of(bare)[stage]
        assert result["rates"][4:] == pytest.approx([0.025 + 0.0025 * at for at in (6.5, 7.5)])
        assert result["back"] == [True, True, 8]
