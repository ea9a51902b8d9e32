"""ZeRO 1 and 2 of DeepSpeed before 0.19.5: the account of parameters that a window has used, and its end.

With CPU offload these releases keep no account of what was accumulated on the host, and those before 0.19.0 lose every
gradient between the first and the last of a window (DeepSpeed #7967).
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator

from ds_parity.engine.internals.guards import ZERO12, source
from ds_parity.engine.internals.older_surface import OlderZero12
from ds_parity.engine.internals.surface import Parameter


def supply_zero12(optimizer: OlderZero12) -> None:
    """Supply a wrapper with the names that it lacks.

    Args:
        optimizer: DeepSpeedZeroOptimizer of an engine that has not run a pass.
    """
    if not hasattr(optimizer, "_clear_param_grad_only"):
        _let_backwards_clear(optimizer)
    if not hasattr(optimizer, "_use_compact_grad_partition_buffer"):
        optimizer._use_compact_grad_partition_buffer = _no_group
    if hasattr(optimizer, "finalize_gradient_accumulation_boundary"):
        return
    optimizer.finalize_gradient_accumulation_boundary = types.MethodType(_finalize, optimizer)
    if not optimizer.cpu_offload:
        return
    optimizer._offload_accumulated_param_ids = set()
    optimizer._restore_cpu_offload_grad_to_gpu = types.MethodType(_restore, optimizer)
    optimizer.copy_grads_in_partition = types.MethodType(_copy_grads_in_partition, optimizer)
    if "else:\n            copy_gradients_to_cpu()" in source(ZERO12, "async_accumulate_grad_in_cpu_via_gpu"):
        _accumulate_all(optimizer)
    _forget_at_each_step(optimizer)


def _let_backwards_clear(optimizer: OlderZero12) -> None:
    """Let each backward clear what it has reduced, by the bare `zero_grad`.

    Up to 0.18.5 its end calls the public method, which does nothing inside a window once it is guarded (kept.py); later
    ones have a method of their own for it.
    """
    bare: Callable[..., None] = optimizer.zero_grad
    epilogue: Callable[[], None] = optimizer.independent_gradient_partition_epilogue

    def clearing_epilogue() -> None:
        guarded, optimizer.zero_grad = optimizer.zero_grad, bare
        try:
            epilogue()
        finally:
            optimizer.zero_grad = guarded

    optimizer.independent_gradient_partition_epilogue = clearing_epilogue


def _no_group(_: int) -> bool:
    return False


def _copy_grads_in_partition(optimizer: OlderZero12, param: Parameter) -> None:
    """Take a reduced gradient to the host, and at the boundary to the optimizer (stage_1_and_2.py, 0.19.5)."""
    boundary = optimizer.is_gradient_accumulation_boundary
    # Only the lone pass of a window has nothing to add to and nothing to keep.
    if optimizer.micro_step_id > 0 or not boundary:
        optimizer.async_accumulate_grad_in_cpu_via_gpu(param)
        optimizer._offload_accumulated_param_ids.add(optimizer.get_param_id(param))
    if boundary:
        _give_to_optimizer(optimizer, param)


def _give_to_optimizer(optimizer: OlderZero12, param: Parameter) -> None:
    optimizer.set_norm_for_param_grad_in_gpu(param)
    optimizer.update_offload_overflow_tracker_for_param_grad(param)
    optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)


def _accumulate_all(optimizer: OlderZero12) -> None:
    accumulate: Callable[[Parameter], None] = optimizer.async_accumulate_grad_in_cpu_via_gpu

    def accumulate_and_keep(param: Parameter) -> None:
        accumulate(param)
        if optimizer.micro_step_id <= 0:
            return
        # The sum is there, and only the first gradient of a window was taken back to the host.
        number = optimizer.get_param_id(param)
        _, offset, _, length = optimizer.grad_position[number]
        total = optimizer.get_param_gradient_attribute(param).data.view(-1)
        if optimizer.low_precision_master_weights_and_grads:
            total = total.narrow(0, offset, length)
        optimizer.accumulated_grads_in_cpu[number].data.copy_(total, non_blocking=True)

    optimizer.async_accumulate_grad_in_cpu_via_gpu = accumulate_and_keep


def _forget_at_each_step(optimizer: OlderZero12) -> None:
    reset: Callable[[], None] = optimizer.reset_cpu_buffers

    def reset_cpu_buffers() -> None:
        reset()
        optimizer._offload_accumulated_param_ids.clear()

    optimizer.reset_cpu_buffers = reset_cpu_buffers


def _restore(optimizer: OlderZero12, param: Parameter) -> None:
    """Bring back what was accumulated on the host (stage_1_and_2.py, 0.19.5, _restore_cpu_offload_grad_to_gpu)."""
    number = optimizer.get_param_id(param)
    _, offset, _, length = optimizer.grad_position[number]
    kept = optimizer.accumulated_grads_in_cpu[number].view(-1)
    device = get_accelerator().current_device_name()
    restored = torch.zeros(param.numel(), dtype=kept.dtype, device=device)
    slot = restored.narrow(0, offset, length) if optimizer.low_precision_master_weights_and_grads else restored
    slot.copy_(kept, non_blocking=True)
    setattr(param, "grad_accum" if optimizer.use_grad_accum_attribute else "grad", restored.view_as(param))


def _finalize(optimizer: OlderZero12) -> None:
    """End a window without a backward (stage_1_and_2.py, 0.19.5, finalize_gradient_accumulation_boundary)."""
    optimizer.is_gradient_accumulation_boundary = True
    if optimizer.cpu_offload:
        for param in (p for group in optimizer.params_in_partition for p in group if p.requires_grad):
            if optimizer.get_param_id(param) in optimizer._offload_accumulated_param_ids:
                _restore(optimizer, param)
                _give_to_optimizer(optimizer, param)
        return
    for index, _ in enumerate(optimizer.bit16_groups):
        optimizer.averaged_gradients[index] = optimizer.get_flat_partition(
            optimizer.params_in_partition[index],
            optimizer.first_offset[index],
            optimizer.partition_size[index],
            dtype=optimizer.gradient_accumulation_dtype,
            device=get_accelerator().current_device_name(),
            param_group_idx=index,
            return_tensor_list=True,
        )
        optimizer.all_grad_tensors[index] = None
