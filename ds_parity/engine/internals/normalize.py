"""Dividing a loss as it goes in, and correcting the accumulated gradient at the boundary.

With losses divided by the expected total E, the window's gradient stands at sum(w * grad l) / E; the step needs it
times E / T, T the actual total. This module, schedule.py, leftout.py, sequence.py and counters.py are the only ones that
touch what DeepSpeed keeps to itself; it was read in DeepSpeed 0.19.8, and tests/engine/test_internals.py fails by name
when it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer

from ds_parity.errors import ConfigError


def averaged_over(engine: Any, ranks: int, peers: int) -> int:
    """Return what DeepSpeed divides the sum of all ranks' gradients by.

    With sequence parallelism the sum runs over data- x sequence-parallel ranks. ZeRO 0 to 2 and BF16_Optimizer divide it
    by the data-parallel ranks (engine.py, _reduce_non_expert_gradients; stage_1_and_2.py, average_tensor), ZeRO 3 by all
    of them (coalesced_collectives.py, reduce_scatter_coalesced).

    Args:
        engine: the bare engine.
        ranks: data-parallel ranks.
        peers: ranks that share a micro-batch, 1 without sequence parallelism.
    """
    if not engine.gradient_average:
        return 1
    return ranks * peers if engine.zero_optimization_stage() == 3 else ranks


def divisor(expected: float, weight: int, ranks: int, loss_reduction: str, peers: int = 1) -> float:
    """Return what a loss is divided by, so that DeepSpeed's reduction leaves weight * grad loss / expected.

    With sequence parallelism the gradients of a micro-batch's `peers`, added up, are `peers` times its own: each of them
    gives the whole loss, which it gathered from all (ALST).

    One division of two exact numbers: with n equal micro-batches on each rank it is n to the last bit, and
    `loss / divisor` is DeepSpeed's own `loss / gradient_accumulation_steps`.

    Args:
        expected: expected total of the window (> 0).
        weight: weight of this micro-batch (> 0).
        ranks: what DeepSpeed divides the sum over ranks by (`averaged_over`).
        loss_reduction: `mean` (the loss is a mean over its weight units) or `sum`.
        peers: ranks that share a micro-batch, 1 without sequence parallelism.
    """
    return expected * peers / (ranks * (1 if loss_reduction == "sum" else weight))


@contextmanager
def silenced(module: torch.nn.Module) -> Iterator[None]:
    """Make whatever backward runs inside contribute exactly zero, also where the forward gave inf or NaN.

    The zeros are put in before a gradient is accumulated, so that DeepSpeed's reductions run as in any other pass.
    """
    trained = (p for p in module.parameters() if p.requires_grad)
    handles = [p.register_hook(torch.zeros_like) for p in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep_clip_norm(engine: Any) -> None:
    """Let the engine keep the norm that it computes to clip fp32 gradients on ZeRO 0, and throws away.

    Without it `get_global_grad_norm()` is None there. Costs nothing: the same call, its result kept.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients


def unscaled_loss_scale(engine: Any) -> float:
    """Return what the loss must be multiplied by before `engine.backward`: the loss scale that DeepSpeed leaves out.

    1 everywhere but for fp16 on ZeRO 0, where `engine.backward` does not scale and the step unscales all the same.
    """
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return float(config.cur_scale) if config is not None and config.use_grad_scaling else 1.0


def corrects_every_step(engine: Any) -> bool:
    """Whether each step needs the correction, by a factor of 1 too: DeepSpeed unscales those by the wrong scale.

    A step at which a dynamic loss scale grows is unscaled by the new scale, and so applied at half its size (step() in
    stage_1_and_2.py, stage3.py, fused_optimizer.py and unfused_optimizer.py); a GradScaler's scale is left out of
    clipping and norm on ZeRO 1 to 3, and a step that it skips on ZeRO 0 is counted as taken.
    """
    return bool(engine.fp16_enabled()) or _grad_scaler(engine) is not None


def _grad_scaler(engine: Any) -> Any:
    # torch_autocast in fp16. ZeRO 1 to 3 keep one in the optimizer, stage 0 in the engine.
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None) or engine.torch_autocast_z0_gradscaler


@contextmanager
def _zero(engine: Any, expected: float, total: float) -> Iterator[None]:
    # The factor E / T rides on the unscale that step() does anyway; a dynamic scaler's own state never sees it.
    optimizer, scaler = engine.optimizer, _grad_scaler(engine)
    before = optimizer.custom_loss_scaler, optimizer.external_loss_scale
    scale = optimizer.loss_scale if scaler is None else scaler.get_scale()
    optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, scale * total / expected
    # ZeRO then unscales by the GradScaler's scale itself, before it clips, on all ranks and groups alike.
    optimizer.torch_autocast_gradscaler = None
    try:
        yield
    finally:
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = before
        optimizer.torch_autocast_gradscaler = scaler
    if scaler is not None:
        _tell(scaler, optimizer.overflow, engine.device)


def _tell(scaler: Any, overflow: bool, device: Any) -> None:
    # A GradScaler learns of an overflow from gradients alone, so it is shown one; DeepSpeed never tells it.
    shown = torch.zeros(1, device=device, requires_grad=True)
    shown.grad = torch.full_like(shown, float("inf") if overflow else 0.0)
    scaler.unscale_(torch.optim.SGD([shown], lr=0.0))
    scaler.update()


@contextmanager
def _low_precision(engine: Any, expected: float, total: float) -> Iterator[None]:
    # Held during the step, a dynamic scale moves after it, by what the step came to.
    optimizer, config = engine.optimizer, engine.optimizer.loss_scale_config
    scale, dynamic, iteration = config.cur_scale, config.dynamic_loss_scale, config.cur_iter
    config.cur_scale, config.dynamic_loss_scale = scale * total / expected, False
    try:
        yield
    finally:
        config.cur_scale, config.dynamic_loss_scale = scale, dynamic
    if dynamic:
        config.cur_iter = iteration
        optimizer._update_scale(optimizer.overflow)
    if isinstance(optimizer, FP16_UnfusedOptimizer) and engine.was_step_applied():
        # The unfused wrapper keeps the norm of the gradients as they came in, before the unscale.
        optimizer._global_grad_norm = engine._global_grad_norm = engine._global_grad_norm * (expected / total / scale)


@contextmanager
def _bf16_accumulated(engine: Any, expected: float, total: float) -> Iterator[None]:
    for flat in engine.optimizer.fp32_groups_gradients_flat:
        flat.mul_(expected / total)
    yield


@contextmanager
def _plain(engine: Any, expected: float, total: float) -> Iterator[None]:
    if expected != total:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(expected / total)
    with nullcontext() if _grad_scaler(engine) is None else _noting_a_skip(engine.optimizer):
        yield


@contextmanager
def _noting_a_skip(optimizer: Any) -> Iterator[None]:
    """Let the engine see that a GradScaler skipped the optimizer: it counts a step as skipped by `optimizer.overflow`.

    torch's optimizers have no such attribute, so DeepSpeed moves the scheduler and counts a step that was none.
    """

    def stepped(*_: Any) -> None:
        # Fused optimizers are called in any case, and skip by `found_inf`, which they are given for the call.
        optimizer.overflow = bool(getattr(optimizer, "found_inf", False))

    optimizer.overflow = True
    handle = optimizer.register_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()


_Correction = Callable[[Any, float, float], AbstractContextManager[None]]
_CORRECTIONS: tuple[tuple[type, _Correction], ...] = (
    (DeepSpeedZeroOptimizer, _zero),
    (DeepSpeedZeroOptimizer_Stage3, _zero),
    (BF16_Optimizer, _bf16_accumulated),
    (FP16_Optimizer, _low_precision),
    (FP16_UnfusedOptimizer, _low_precision),
    (torch.optim.Optimizer, _plain),
)


def correction_for(optimizer: Any) -> _Correction:
    """Return how to correct gradients under this optimizer wrapper: a context around DeepSpeed's `step()`.

    Raises:
        ConfigError: nothing here knows how the wrapper keeps its gradients.
    """
    for kind, correction in _CORRECTIONS:
        # SuperOffload derives from ZeRO 3 and steps before a correction; torch's optimizers derive as they like.
        if type(optimizer) is kind or (kind is torch.optim.Optimizer and isinstance(optimizer, kind)):
            return correction
    known = ", ".join(kind.__name__ for kind, _ in _CORRECTIONS)
    raise ConfigError(
        f"optimizer wrapper {type(optimizer).__name__}: ds_parity corrects accumulated gradients under {known} only; "
        "choose a configuration that builds one of these, or drop gradient_accumulation_passes"
    )


def reduce_accumulated(engine: Any) -> None:
    """Reduce what is accumulated, as the boundary's backward would have: for a window that ends without one.

    This is what DeepSpeed's step() does under `managed_gradient_accumulation: false` (engine.py, step). With `overlap_comm`
    ZeRO 1 leaves the reduction to hooks of the backward, so it takes what DeepSpeed does at the end of
    `coalesce_grad_reduction` (_flush_coalesced_reduction_zero12).
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_gradients():
        optimizer.finalize_gradient_accumulation_boundary()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.overlap_comm:
        _reduce_what_is_there(optimizer)
    else:
        engine.allreduce_gradients()


def _reduce_what_is_there(optimizer: Any) -> None:
    # A boundary's pass without its backward.
    if not get_accelerator().resolves_data_dependency():
        optimizer.reduction_stream.synchronize()  # the reduction of the last pass may still use the buckets
    optimizer.setup_buckets()
    for index, group in enumerate(optimizer.bit16_groups):
        for param in group:
            if param.requires_grad and optimizer.get_gradient_for_reduction(param) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(param, index)
    optimizer.overlapping_partition_gradients_reduce_epilogue()


def loss_scale(engine: Any) -> float | None:
    """Return the fp16 loss scale as DeepSpeed logs it, None in other precisions.

    engine.py, _get_optimizer_loss_scale, which not every version has.
    """
    if not engine.fp16_enabled():
        return None
    config = getattr(engine.optimizer, "loss_scale_config", None)
    scale = getattr(engine.optimizer, "cur_scale", None) if config is None else config.cur_scale
    return None if scale is None else float(scale)


def let_parameters_go(engine: Any) -> None:
    """Partition what passes left gathered, as every `step()` of ZeRO 3 does first: for a boundary that takes none."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        engine.optimizer._partition_all_parameters()


def has_every_gradient(engine: Any) -> bool:
    """Whether every parameter has a gradient accumulated on this rank: ZeRO 1 reduces only those that do.

    Ranks that have others would reduce buckets of different sizes. ZeRO 0 fills zeros in.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        trained = (p for group in optimizer.bit16_groups for p in group if p.requires_grad)
        return all(optimizer.get_gradient_for_reduction(p) is not None for p in trained)
    if isinstance(optimizer, BF16_Optimizer):
        return all(has for group in optimizer.fp32_groups_has_gradients for has in group)
    return int(engine.zero_optimization_stage()) == 0


def discard_accumulated(engine: Any) -> None:
    """Throw the accumulated gradients away, as DeepSpeed does on an overflow; the engine can go on after it."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.zero_grad(set_to_none=True)
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._pre_step()
        let_parameters_go(engine)
        optimizer._overflow_clean_up(optimizer.loss_scale)
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    else:
        engine.zero_grad()
