"""Steps of a gradient that is not finite, which older releases of DeepSpeed take in fp32 and bf16 on ZeRO 1 to 3.

Every weight is NaN then. 0.19.8 skips such a step in every precision, by the norm of the gradient; 0.19.5 does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.features import Wanted
from ds_parity.engine.internals.guards import BF16, ZERO3, ZERO12, source
from ds_parity.engine.internals.older_surface import OlderBf16, OlderZero3, OlderZero12
from ds_parity.engine.internals.surface import Engine

_SKIPS = "is_invalid_grad_norm"
_LEAST = 1e-18
_OVERFLOW = "overflow"  # by which an engine counts a step as skipped, and this wrapper has none


def supply_overflow(engine: Engine, optimizer: Any) -> None:
    """Let a step of a gradient that is not finite be skipped; nothing is done where DeepSpeed does so.

    Args:
        engine: that has not run a pass.
        optimizer: its wrapper of ZeRO, or BF16_Optimizer.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        older = _SKIPS not in source(ZERO12, "step")
        # 0.19.8 goes by a switch of the section bf16 where weights are so, also where that section is off.
        unasked = optimizer.dtype is torch.bfloat16 and not engine.bfloat16_enabled()
        if (older or unasked) and not _switched_off(engine.config):
            if not optimizer.check_grad_overflow:
                _look_without_a_copy(optimizer)
            optimizer.check_grad_overflow = True
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if _SKIPS not in source(ZERO3, "step") and optimizer.dtype is not torch.float16:
            _check_before_update(optimizer)
    # Experts and tensor-parallel ranks have gradients of their own, so one rank can't decide there.
    elif _SKIPS not in source(BF16, "step") and engine.mpu is None and not engine.has_moe_layers:
        _step_by_norm(optimizer)


def _switched_off(config: Any) -> bool:
    # A switch of bf16's own, which 0.19.8 obeys on ZeRO 1 and 2; in older releases it is off where it is not given.
    if not isinstance(config, dict):
        return False
    return Wanted(config).off(f"{'bf16' if 'bf16' in config else 'bfloat16'}.check_grad_overflow")


def _look_without_a_copy(optimizer: OlderZero12) -> None:
    """Let a gradient be searched where it lies; DeepSpeed's own search copies it in fp32, which bf16 has not paid."""

    def has_inf_or_nan(gradient: torch.Tensor, _: Any = None) -> torch.Tensor:
        # The largest number's absolute value; a NaN wins over all others.
        largest = torch.linalg.vector_norm(gradient, torch.inf) if gradient.numel() else gradient.new_zeros(())
        return largest.isfinite().logical_not().float()

    optimizer._has_inf_or_nan = has_inf_or_nan


def _check_before_update(optimizer: OlderZero3) -> None:
    update: Callable[[], bool] = optimizer._overflow_check_and_loss_scale_update

    def checked() -> bool:
        optimizer.check_overflow()
        return update()

    optimizer._overflow_check_and_loss_scale_update = checked


def _step_by_norm(optimizer: OlderBf16) -> None:
    """Skip what is not finite, and let zeros pass, on which these releases assert that the norm is above 0."""
    step: Callable[[], None] = optimizer.step
    of_norm: Callable[..., tuple[list[torch.Tensor], Any]] = optimizer.get_grads_for_norm
    setattr(optimizer, _OVERFLOW, False)

    def with_the_least(for_clipping: bool = False) -> Any:
        found = of_norm(for_clipping)
        if for_clipping:
            return found
        some, experts = found
        # Its square is above 0 in fp32, too.
        least = torch.full((1,), _LEAST, device=get_accelerator().current_device_name())
        return [*some, least], experts

    def stepped() -> None:
        # All ranks have the same gradients here, which were reduced to each.
        norm = torch.nn.utils.get_total_norm(of_norm()[0])
        setattr(optimizer, _OVERFLOW, not bool(norm.isfinite()))
        if not norm.isfinite():
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
            return
        if norm == 0:
            optimizer.get_grads_for_norm = with_the_least
        try:
            step()
        finally:
            optimizer.get_grads_for_norm = of_norm

    optimizer.step = stepped
