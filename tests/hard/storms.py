"""What forked ranks do in a storm: windows that overflow one after another, ours beside the bare engine driven by hand.

Held in test_storms.py. A pattern has a letter a window: "." is calm, "x" overflows, on one rank in one of its passes.
"""

import deepspeed
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
        For each both engines' lines, one a window, and how far ours lies from a run without the windows that overflow.
    """
    with fp16_allowed():
        found = {pattern: _storm(stage, kind, pattern, fp16) for pattern in patterns}
    forget_autocast()
    return found


def _storm(stage, kind, pattern, fp16):
    ours, at = _ours(stage, kind, pattern, fp16)
    bare = None if kind == "autocast" else _bare(stage, pattern, fp16)
    calm, calm_at = _ours(stage, kind, pattern.replace("x", ""), fp16)
    return {
        "ours": ours,
        "bare": bare,
        "rates": [line["lr"] for line in calm],
        "off": float((at - calm_at).abs().max()),
    }


def minimum(rank, stage, fp16):
    """Overflow until an engine raises, or 12 times: what ours and the bare engine say, and in which window."""
    found = {}
    with fp16_allowed():
        for name, run in (("ours", _ours), ("bare", lambda stage, kind, *rest: _bare(stage, *rest))):
            lines = []
            try:
                run(stage, "fp16", "x" * 12, fp16, lines)
            except Exception as error:  # DeepSpeed raises a bare Exception there
                found[name] = [f"{type(error).__name__}: {error}", len(lines)]
            else:
                found[name] = ["", lines[-1]["scale"]]
    return found


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


def _ours(stage, kind, pattern, fp16, lines=None):
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
