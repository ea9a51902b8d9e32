"""ZeRO 3 of DeepSpeed before 0.19.5: the account of parameters that a window has used, and what follows from it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.engine.internals.older_leftovers import release_leftovers
from ds_parity.engine.internals.older_surface import OlderZero3
from ds_parity.engine.internals.surface import Zero3Parameter


def supply_zero3(optimizer: OlderZero3) -> None:
    """Supply a wrapper with the names that it lacks.

    Args:
        optimizer: DeepSpeedZeroOptimizer_Stage3 of an engine that has not run a pass.
    """
    release_leftovers(optimizer)
    if not hasattr(optimizer, "_get_param_partition_rank"):
        optimizer._get_param_partition_rank = types.MethodType(_partition_rank, optimizer)
    if hasattr(optimizer, "_offload_boundary_param_ids"):
        return
    _keep_account(optimizer)
    for name, function in (
        ("_offload_grad_partition_at_boundary", _offload_grad_partition),
        ("_swap_out_offload_fp32_gradients", _swap_out),
        ("finalize_gradient_accumulation_boundary", _finalize),
    ):
        setattr(optimizer, name, types.MethodType(function, optimizer))


def _partition_rank(optimizer: OlderZero3, _: Zero3Parameter) -> int:
    return dist.get_rank(group=optimizer.dp_process_group)


def _keep_account(optimizer: OlderZero3) -> None:
    optimizer._offload_boundary_param_ids = set()
    partition: Callable[..., Any] = optimizer.partition_grads
    pre_step: Callable[[], None] = optimizer._pre_step

    def partition_grads(params_to_release: list[Zero3Parameter], grad_partitions: list[Any]) -> Any:
        # The last ranks hold nothing of a parameter with fewer elements than there are ranks.
        optimizer._offload_boundary_param_ids.update(
            param.ds_id
            for param in params_to_release
            if param.partition_numel() * optimizer._get_param_partition_rank(param) < param.ds_numel
        )
        return partition(params_to_release, grad_partitions)

    def forgetting_pre_step() -> None:
        pre_step()
        optimizer._offload_boundary_param_ids = set()

    optimizer.partition_grads = partition_grads
    optimizer._pre_step = forgetting_pre_step


def _offload_grad_partition(
    optimizer: OlderZero3,
    param: Zero3Parameter,
    grad_buffer: Any,
    offload_fp32_gradients: dict[int, Any],
    offload_fp32_offsets: dict[int, Any],
) -> None:
    """Give one gradient partition to the optimizer (stage3.py, 0.19.5, _offload_grad_partition_at_boundary)."""
    number = optimizer.get_param_id(param)
    group, offset, _ = optimizer.grad_position[number]
    optimizer.norm_for_param_grads[number] = optimizer._constant_buffered_norm2(grad_buffer)
    gradient = grad_buffer.to(dtype=optimizer.master_weights_and_grads_dtype)
    if optimizer._swappable_optimizer_subgroup(group):
        offload_fp32_gradients.setdefault(group, []).append(gradient)
        offload_fp32_offsets.setdefault(group, []).append(offset)
    else:
        optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, offset, grad_buffer.numel()).copy_(gradient)


def _swap_out(optimizer: OlderZero3, gradients: dict[int, Any], offsets: dict[int, Any]) -> None:
    if not (optimizer.offload_optimizer and optimizer.swap_optimizer):
        return
    for group, tensors in gradients.items():
        optimizer.optimizer_swapper.swap_out_gradients(
            parameter=optimizer.fp32_partitioned_groups_flat[group],
            gradient_offsets=offsets[group],
            gradient_tensors=tensors,
        )


def _finalize(optimizer: OlderZero3) -> None:
    """End a window without a backward (stage3.py, 0.19.5, finalize_gradient_accumulation_boundary)."""
    optimizer.is_gradient_accumulation_boundary = True
    if not optimizer.offload_optimizer:
        return
    gradients: dict[int, Any] = {}
    offsets: dict[int, Any] = {}
    partitions = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    for param in (p for group in optimizer.fp16_groups for p in group):
        if param.ds_id not in optimizer._offload_boundary_param_ids or param.ds_id not in partitions:
            continue
        gradient = partitions[param.ds_id]
        # Norms are added up, and those of other parameters lie on the accelerator.
        if not get_accelerator().on_accelerator(gradient):
            gradient = gradient.to(get_accelerator().current_device_name(), non_blocking=True)
        optimizer._offload_grad_partition_at_boundary(param, gradient, gradients, offsets)
    optimizer._swap_out_offload_fp32_gradients(gradients, offsets)
