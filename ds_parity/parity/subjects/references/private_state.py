"""What the references and the controls read and write of DeepSpeed's own state: no other file of theirs touches it.

It was read in DeepSpeed 0.19.8. Nothing here is taken from the engine under test, which has its own `internals`: in one
piece of code for both, an error would cancel out of every comparison.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from deepspeed.utils import groups


def schedule_of(kind: str) -> Any:
    """Return DeepSpeed's own scheduler class of a name, such as `WarmupLR`.

    Raises:
        AttributeError: DeepSpeed has none of that name.
    """
    return getattr(lr_schedules, kind)


def is_deepspeeds_schedule(scheduler: Any) -> bool:
    """Whether a scheduler is one of DeepSpeed's own, all of which are functions of their step."""
    return bool(type(scheduler).__module__ == lr_schedules.__name__)


def keep_clip_norm(engine: Any) -> None:
    """Let the engine keep the norm by which it clips fp32 gradients on ZeRO 0.

    DeepSpeed computes that norm and drops it (engine.py, `clip_fp32_gradients`), so `get_global_grad_norm()` would be
    None there and nothing could be compared. The call is the same, only its result is kept.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients


def clip_by_all_experts(engine: Any) -> None:
    """Let the engine clip by the norm of the whole gradient, experts included, on ZeRO 0.

    In fp32, where experts lie on different ranks, DeepSpeed takes the mean of the ranks' norms, each of a rank's own
    experts and of what all have (tools/deepspeed_faults/expert_norm_zero0.py). In low precision without a fused Adam
    it takes the norm of what all have (expert_norm_unfused.py).
    """
    everywhere = [one for one in engine.module.modules() if isinstance(one, MOELayer)]
    layers = [one for one in everywhere if one.ep_size > 1]
    if everywhere and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        _clip_unfused_by_all_experts(engine.optimizer, layers[0].ep_group if layers else None)
    if not layers or engine.zero_optimization() or engine.bfloat16_enabled() or engine.fp16_enabled():
        return
    group = layers[0].ep_group  # the harness has no model of layers that are shared by other ranks each

    def clip_fp32_gradients() -> None:
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        common, own = (torch.zeros((), device=engine.device) for _ in range(2))
        for parameter in trained:
            square = parameter.grad.float().pow(2).sum()
            common, own = (common + square, own) if getattr(parameter, "allreduce", True) else (common, own + square)
        dist.all_reduce(own, group=group)
        norm = (common + own).sqrt()
        factor = torch.clamp(engine.gradient_clipping() / (norm + 1e-6), max=1.0)
        for parameter in trained:
            parameter.grad.mul_(factor)
        engine._global_grad_norm = norm

    engine.clip_fp32_gradients = clip_fp32_gradients


def _clip_unfused_by_all_experts(optimizer: Any, group: Any) -> None:
    clip = optimizer.unscale_and_clip_grads

    def clip_by_all(total_norm: float, apply_scale: bool = True) -> Any:
        own = torch.zeros((), device=optimizer.fp16_groups[0][0].device)
        for parameter in (one for group in optimizer.fp16_groups for one in group):
            if not getattr(parameter, "allreduce", True) and parameter.grad is not None:
                own = own + parameter.grad.float().pow(2).sum()
        if group is not None:
            dist.all_reduce(own, group=group)
        optimizer._global_grad_norm = math.sqrt(float(total_norm) ** 2 + float(own))
        return clip(optimizer._global_grad_norm, apply_scale)

    optimizer.unscale_and_clip_grads = clip_by_all


def loss_scale(engine: Any) -> float | None:
    """Return the fp16 loss scale as DeepSpeed logs it, None in other precisions.

    The rule is that of engine.py, `_get_optimizer_loss_scale`, which older versions lack.
    """
    if not engine.fp16_enabled():
        return None
    scale = getattr(_keeper_of_scale(engine.optimizer), "cur_scale", None)
    return None if scale is None else float(scale)


def missing_loss_scale(engine: Any) -> float | None:
    """Return the loss scale that the caller has to multiply in himself, None where DeepSpeed does it.

    In fp16 on ZeRO 0, `engine.backward` does not scale the loss, though the step unscales the gradients
    (tools/deepspeed_faults/fp16_zero0_unscaled_loss.py).
    """
    if engine.fp16_enabled() and not engine.zero_optimization():
        return float(_keeper_of_scale(engine.optimizer).cur_scale)
    return None


def _keeper_of_scale(optimizer: Any) -> Any:
    # The wrappers without ZeRO keep it in a section of its own; DeepSpeed up to 0.18.5, and ZeRO's, in themselves.
    return getattr(optimizer, "loss_scale_config", None) or optimizer


def scales_losses(engine: Any) -> bool:
    """Whether gradients are accumulated scaled: in fp16, and with `torch_autocast` in fp16."""
    return bool(engine.fp16_enabled()) or getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None


def corrected_step(engine: Any, expected: float, total: float) -> Any:
    """Step with the accumulated gradient multiplied by expected / total before norm and clipping.

    Args:
        engine: the bare engine, at its boundary.
        expected: the total that losses were divided by as they went in (> 0).
        total: the total that the step is to be divided by (> 0).

    Returns:
        The norm of the corrected gradient before clipping.
    """
    optimizer = engine.optimizer
    # This wrapper has no loss scale on which the factor could ride, so its buffers are multiplied.
    if isinstance(optimizer, BF16_Optimizer):
        for flat in optimizer.fp32_groups_gradients_flat:
            flat.mul_(expected / total)
        engine.step()
        return engine.get_global_grad_norm()
    if engine.zero_optimization():
        return _corrected_by_scale(engine, expected, total)
    if engine.bfloat16_enabled() or engine.fp16_enabled():
        return _corrected_without_zero(engine, expected, total)
    # A plain torch optimizer on ZeRO 0 unscales nothing either.
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(expected / total)
    engine.step()
    return engine.get_global_grad_norm()


def _corrected_by_scale(engine: Any, expected: float, total: float) -> Any:
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    scale = optimizer.loss_scale if scaler is None else scaler.get_scale()
    optimizer.override_loss_scale(scale * total / expected)
    # With a GradScaler ZeRO would clip gradients that are still scaled; without one it unscales them first.
    optimizer.torch_autocast_gradscaler = None
    engine.step()
    # The next step must find the scale that its losses are multiplied by.
    optimizer.custom_loss_scaler, optimizer.external_loss_scale = False, None
    optimizer.torch_autocast_gradscaler = scaler
    return engine.get_global_grad_norm()


def _corrected_without_zero(engine: Any, expected: float, total: float) -> Any:
    optimizer, config = engine.optimizer, _keeper_of_scale(engine.optimizer)
    scale, dynamic, iterations = config.cur_scale, config.dynamic_loss_scale, config.cur_iter
    # A dynamic scale must not move inside the step: it would move from the scale that carries the correction.
    config.cur_scale, config.dynamic_loss_scale = scale * total / expected, False
    engine.step()
    config.cur_scale, config.dynamic_loss_scale = scale, dynamic
    if dynamic:
        # The step has counted itself; _update_scale counts it again.
        config.cur_iter = iterations
        optimizer._update_scale(optimizer.overflow)
    # The unfused wrapper keeps the norm as the gradients came in.
    raw = isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.overflow
    norm = engine.get_global_grad_norm()
    return norm * (expected / total / scale) if raw else norm


def lose_gradients(engine: Any) -> None:
    """Throw away what a window has accumulated, as a process does that ends in its middle; the engine can go on."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.zero_grad(set_to_none=True)
        # The next pass counts as the first of its window, and so overwrites the buffers in place of adding to them.
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # The three calls by which step() throws an overflow away, in its order.
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(optimizer.loss_scale)
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    else:
        engine.zero_grad()


def lose_optimizer_state(engine: Any) -> None:
    """Make the optimizer begin anew, with no momentum, on the weights as they are."""
    engine.basic_optimizer.state.clear()


def forget_tensor_groups(size: int) -> None:
    """Let the next AutoTP engine make groups of its own, where an earlier one has made some of another size.

    DeepSpeed makes them once a process, and takes them for every later engine (utils/groups.py, _init_tp_mesh_device).

    Args:
        size: ranks that share a model (>= 1).
    """
    made = groups._TENSOR_MODEL_PARALLEL_GROUP
    if made is not None and dist.get_world_size(made) != size:
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None


def averages_over_ranks(engine: Any) -> bool:
    """Whether DeepSpeed divides the sum of all ranks' gradients, as it does unless `gradient_allreduce_op` is `sum`."""
    return bool(engine.gradient_average)
