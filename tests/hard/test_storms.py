"""fp16 overflow storms: windows that overflow in a row skip their steps and move nothing else."""

from random import Random

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.config import rewrite
from ds_parity.engine.internals.adapter import choose
from ds_parity.parity.running import weights
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import config

PASSES = 3  # of each rank in a window


def storms(rank, stage, kind, patterns, fp16):
    """Run patterns on both engines, each on fresh ones.

    Args:
        rank: of this process.
        stage: ZeRO stage.
        kind: `fp16`, or `autocast`, whose bare engine does not get over an overflow and is left out.
        patterns: of windows.
        fp16: keys of DeepSpeed's fp16 section.

    Returns:
        For each pattern both engines' lines, one a window, and how far ds_parity's lie from a run that has no overflow.
    """
    with fp16_allowed():
        results = {pattern: _storm(stage, kind, pattern, fp16) for pattern in patterns}
    forget_autocast()
    return results


def _storm(stage, kind, pattern, fp16):
    wrapped, at = _wrapped(stage, kind, pattern, fp16)
    bare = None if kind == "autocast" else _bare(stage, pattern, fp16)
    calm, calm_at = _wrapped(stage, kind, pattern.replace("x", ""), fp16)
    return {
        "ds_parity": wrapped,
        "bare": bare,
        "rates": [line["lr"] for line in calm],
        "off": float((at - calm_at).abs().max()),
    }


def minimum(rank, stage, fp16):
    """Overflow until an engine raises, or 12 times: what ds_parity and the bare engine say, and in which window."""
    result = {}
    with fp16_allowed():
        for name, run in (("ds_parity", _wrapped), ("bare", lambda stage, kind, *rest: _bare(stage, *rest))):
            lines = []
            try:
                run(stage, "fp16", "x" * 12, fp16, lines)
            except Exception as error:  # DeepSpeed raises a bare Exception there
                result[name] = [f"{type(error).__name__}: {error}", len(lines)]
            else:
                result[name] = ["", lines[-1]["scale"]]
    return result


def _extended(stage, kind, fp16):
    extended = config(stage, passes=PASSES * dist.get_world_size())
    del extended["bf16"]
    if kind == "fp16":
        return extended | {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, **fp16}}
    return extended | {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _loss(engine, kind, calm, index, overflows):
    """The loss of a pass: of the calm-th window that does not overflow, whatever lies between."""
    rank = dist.get_rank()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * calm + 10 * index + rank))
    x = x.to(get_accelerator().current_device_name())
    loss = engine(x.half() if kind == "fp16" else x).float().pow(2).mean()
    return loss * 1e30 if overflows and (rank, index) == (calm % dist.get_world_size(), calm % PASSES) else loss


def _wrapped(stage, kind, pattern, fp16, lines=None):
    lines = [] if lines is None else lines
    forget_autocast()
    model = _model()
    engine, *_ = ds_parity.initialize(
        model=model, model_parameters=model.parameters(), config=_extended(stage, kind, fp16)
    )
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    calm = 0
    for letter in pattern:
        for index in range(PASSES):
            engine.backward(_loss(engine, kind, calm, index, letter == "x"))
            engine.step()
        calm += letter == "."
        scale = engine.last_step.loss_scale if scaler is None else scaler.get_scale()
        lines.append(_line(engine, scale))
    return lines, weights.vector(engine.module).float()


def _bare(stage, pattern, fp16, lines=None):
    lines = [] if lines is None else lines
    model, plain = _model(), rewrite(_extended(stage, "fp16", fp16), dist.get_world_size()).config
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    calm = 0
    for letter in pattern:
        for index in range(PASSES):
            engine.set_gradient_accumulation_boundary(index == PASSES - 1)
            loss = _loss(engine, "fp16", calm, index, letter == "x") / PASSES
            if (
                stage == 0
            ):  # DeepSpeed leaves the scaling out there (tools/deepspeed_faults/fp16_zero0_unscaled_loss.py)
                loss = loss * engine.optimizer.loss_scale_config.cur_scale
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
        calm += letter == "."
        lines.append(_line(engine, choose(engine).loss_scale()))
    return lines


def _line(engine, scale):
    return {
        "scale": scale,
        "applied": bool(engine.was_step_applied()),
        "clocks": [engine.global_steps, engine.skipped_steps, engine.lr_scheduler.last_batch_iteration],
        "lr": engine.get_lr(),
        "weights": weights.summary(weights.vector(engine.module)).checksum,
    }


STAGES = (0, 1, 2, 3)
# A storm before the first step, in the middle, at the end; alternating; and random weather.
PATTERNS = [
    "xxxx...x",
    "..xxxxxx..",
    "...xxx",
    ".x.x.x.x.x.",
    *["".join(Random(n).choices(".x", k=14)) for n in range(3)],
]
FP16 = [
    {"initial_scale_power": 16, "hysteresis": 1},
    {"initial_scale_power": 16, "hysteresis": 2},
    {"initial_scale_power": 16, "hysteresis": 3, "consecutive_hysteresis": True},
]
AT_MINIMUM = "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


def runs(forks, function, ranks, **arguments):
    outcomes = forks.run(function, ranks, 200, **arguments)
    assert [one.how for one in outcomes] == ["returned"] * ranks, outcomes
    return [one.value for one in outcomes]


def holds(result, pattern):
    """What is promised of a storm, whatever the engine."""
    wrapped, rates = result["ds_parity"], iter(result["rates"])
    applied, lr = 0, None
    for number, (letter, line) in enumerate(zip(pattern, wrapped, strict=True), start=1):
        assert line["applied"] == (letter == ".")
        applied += line["applied"]
        # Calls of the optimizer, those that were skipped, and a scheduler that stands one behind the steps taken.
        assert line["clocks"] == [number, number - applied, applied - 1]
        lr = next(rates) if line["applied"] else lr
        assert lr is None or line["lr"] == lr
        if letter == "x" and number > 1:
            assert line["weights"] == wrapped[number - 2]["weights"]
    assert result["off"] < 1e-3


@pytest.mark.parametrize("fp16", FP16, ids=lambda keys: f"hysteresis-{keys['hysteresis']}")
@pytest.mark.parametrize("stage", STAGES)
def test_a_storm_is_survived_as_the_bare_engine_survives_it_bit_for_bit(forks, stage, fp16):
    """Scales, clocks, LR and weights of every window, on both ranks alike."""
    first, second = runs(forks, storms, 2, stage=stage, kind="fp16", patterns=PATTERNS, fp16=fp16)
    assert first == second
    for pattern, result in first.items():
        holds(result, pattern)
        assert result["ds_parity"] == result["bare"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_storm_under_autocast_brings_the_scale_down_and_skips_alike(forks, stage):
    first, second = runs(forks, storms, 2, stage=stage, kind="autocast", patterns=PATTERNS, fp16={})
    assert first == second
    for pattern, result in first.items():
        holds(result, pattern)
        scales = [line["scale"] for line in result["ds_parity"]]
        assert scales == [65536.0 / 2 ** pattern[: n + 1].count("x") for n in range(len(pattern))]


@pytest.mark.parametrize("stage", STAGES)
def test_at_the_smallest_scale_every_rank_raises_what_bare_deepspeed_does_or_goes_on_as_it_does(forks, stage):
    fp16 = {"initial_scale_power": 3, "hysteresis": 2, "min_loss_scale": 1}
    by_rank = runs(forks, minimum, 2, stage=stage, fp16=fp16)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0]["ds_parity"] == by_rank[0]["bare"] == (["", 1.0] if stage == 0 else [AT_MINIMUM, 4])
