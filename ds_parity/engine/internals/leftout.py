"""Parameters that a pass or a window leaves out: gradients that DeepSpeed keeps too long, or never takes along.

Beside normalize.py and schedule.py this module touches what DeepSpeed keeps to itself (read in 0.19.8, guarded by
tests/engine/test_internals.py). Shown by tools/deepspeed_faults/stale_gradient.py and used_in_some_passes.py:

- a window's first gradient is copied over the buffer of the one before, and later ones are added to it; what the first
  pass leaves out is added to an old gradient, and what the whole window leaves out is stepped by it again;
- with CPU offload the optimizer's own gradients are written in the boundary's pass, for what that pass uses alone.

Both functions do nothing but look at sets where every pass uses every parameter.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def forget_last_window(engine: Any, boundary: bool) -> None:
    """Clear what the last window left of parameters that this one's first pass did not use; call it after that pass.

    Args:
        engine: the DeepSpeed engine.
        boundary: that pass is the window's last too.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        held, used = _partitions(optimizer), optimizer._offload_boundary_param_ids
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload and not boundary:
        held, used = optimizer.accumulated_grads_in_cpu, optimizer._offload_accumulated_param_ids
    else:
        return
    for left_out in held.keys() - used:
        held[left_out].zero_()


def take_along(engine: Any) -> None:
    """With CPU offload, give the optimizer the gradients of what the boundary's pass did not use; call it before step()."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and optimizer.offload_optimizer:
        _take_along_zero3(optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload:
        _take_along_zero12(optimizer)


def _take_along_zero3(optimizer: Any) -> None:
    gradients: dict[int, Any] = {}
    offsets: dict[int, Any] = {}
    for group in optimizer.fp16_groups:
        for parameter in group:
            if not parameter.requires_grad or optimizer.get_param_id(parameter) in optimizer.norm_for_param_grads:
                continue
            # The last ranks hold nothing of a parameter with fewer elements than there are ranks.
            if parameter.partition_numel() * optimizer._get_param_partition_rank(parameter) < parameter.ds_numel:
                buffer = _partitions(optimizer)[parameter.ds_id]
                optimizer._offload_grad_partition_at_boundary(parameter, buffer, gradients, offsets)
    optimizer._swap_out_offload_fp32_gradients(gradients, offsets)


def _take_along_zero12(optimizer: Any) -> None:
    for index, group in enumerate(optimizer.params_in_partition):
        for parameter in group:
            number = optimizer.get_param_id(parameter)
            if not parameter.requires_grad or number in optimizer.norm_for_param_grads:
                continue
            if number not in optimizer._offload_accumulated_param_ids:
                _, _, offset, length = optimizer.grad_position[number]
                optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, length).zero_()
            elif optimizer._use_compact_grad_partition_buffer(index):
                optimizer.copy_grads_in_partition(parameter, index)
            else:  # as _finalize_cpu_offload_gradient_accumulation does for every parameter
                optimizer._restore_cpu_offload_grad_to_gpu(parameter)
                optimizer.set_norm_for_param_grad_in_gpu(parameter)
                optimizer.update_offload_overflow_tracker_for_param_grad(parameter)
                optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)


def _partitions(optimizer: Any) -> Any:
    return optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
