"""What `older.py` and its neighbours use of older releases of DeepSpeed, as protocols, and what they supply there.

Read in 0.18.4 to 0.19.3; later releases may lack any of it. What is called is declared as an attribute, because it is
replaced on one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch

from ds_parity.engine.internals.surface import Parameter, Zero3Parameter


class OlderEngine(Protocol):
    """DeepSpeedEngine before 0.18.5."""

    sparse_tensor_module_names: set[str]
    bfloat16_enabled: Callable[[], bool]
    _save_checkpoint: Callable[..., Any]
    _load_checkpoint: Callable[..., Any]


class OlderZero12(Protocol):
    """DeepSpeedZeroOptimizer before 0.19.5."""

    cpu_offload: bool
    check_grad_overflow: bool
    _has_inf_or_nan: Callable[..., torch.Tensor]
    micro_step_id: int
    is_gradient_accumulation_boundary: bool
    use_grad_accum_attribute: bool
    low_precision_master_weights_and_grads: bool
    gradient_accumulation_dtype: torch.dtype
    bit16_groups: Sequence[Sequence[Parameter]]
    params_in_partition: Sequence[Sequence[Parameter]]
    first_offset: Sequence[int]
    partition_size: Sequence[int]
    averaged_gradients: MutableMapping[int, Any]
    all_grad_tensors: MutableMapping[int, Any]
    accumulated_grads_in_cpu: Mapping[int, torch.Tensor]
    grad_position: Mapping[int, tuple[int, int, int, int]]
    zero_grad: Callable[..., None]
    reset_cpu_buffers: Callable[[], None]
    independent_gradient_partition_epilogue: Callable[[], None]
    copy_grads_in_partition: Callable[[Parameter], None]
    async_accumulate_grad_in_cpu_via_gpu: Callable[[Parameter], None]
    get_param_id: Callable[[Parameter], int]
    get_param_gradient_attribute: Callable[[Parameter], torch.Tensor]
    get_flat_partition: Callable[..., Any]
    set_norm_for_param_grad_in_gpu: Callable[[Parameter], None]
    update_offload_overflow_tracker_for_param_grad: Callable[[Parameter], None]
    async_inplace_copy_grad_to_fp32_buffer_from_gpu: Callable[[Parameter], None]
    # Supplied.
    finalize_gradient_accumulation_boundary: Callable[[], None]
    _use_compact_grad_partition_buffer: Callable[[int], bool]
    _offload_accumulated_param_ids: set[int]
    _restore_cpu_offload_grad_to_gpu: Callable[[Parameter], None]


class Swapper(Protocol):
    """What writes gradients to a disk."""

    def swap_out_gradients(self, parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
        """Write gradients of one group."""


class Coordinator(Protocol):
    """PartitionedParameterCoordinator: gathers and releases the weights of modules."""

    fetch_sub_module: Callable[..., None]
    release_sub_module: Callable[..., None]


class Offload(Protocol):
    """DeepSpeedZeRoOffload, which hooks a model's modules."""

    get_param_coordinator: Callable[[], Coordinator]


class OlderZero3(Protocol):
    """DeepSpeedZeroOptimizer_Stage3 before 0.19.5."""

    offload_optimizer: bool
    swap_optimizer: bool
    is_gradient_accumulation_boundary: bool
    master_weights_and_grads_dtype: torch.dtype
    dp_process_group: Any
    fp16_groups: Sequence[Sequence[Zero3Parameter]]
    fp32_partitioned_groups_flat: Sequence[Any]
    grad_position: Mapping[int, tuple[int, int, int]]
    norm_for_param_grads: MutableMapping[int, Any]
    optimizer_swapper: Swapper
    parameter_offload: Offload
    backward_epilogue: Callable[[], None]
    partition_grads: Callable[..., Any]
    get_param_id: Callable[[Zero3Parameter], int]
    dtype: torch.dtype
    check_overflow: Callable[[], None]
    _overflow_check_and_loss_scale_update: Callable[[], bool]
    _pre_step: Callable[[], None]
    _constant_buffered_norm2: Callable[[torch.Tensor], Any]
    _swappable_optimizer_subgroup: Callable[[int], bool]
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: Mapping[int, torch.Tensor]
    # Supplied.
    finalize_gradient_accumulation_boundary: Callable[[], None]
    _get_param_partition_rank: Callable[[Zero3Parameter], int]
    _offload_boundary_param_ids: set[int]
    _offload_grad_partition_at_boundary: Callable[..., None]
    _swap_out_offload_fp32_gradients: Callable[..., None]


class OlderBf16(Protocol):
    """BF16_Optimizer before 0.19.8."""

    scale_if_loss: Callable[[Any], Any]
    backward_epilogue: Callable[..., None]
    clear_lp_grads: Callable[..., None]
    clear_hp_grads: Callable[..., None]
    get_grads_for_norm: Callable[..., tuple[list[torch.Tensor], Any]]
    step: Callable[..., None]


class OlderHalf(Protocol):
    """FP16_Optimizer and FP16_UnfusedOptimizer before 0.18.6, which keep their loss scale themselves."""

    cur_scale: float
    cur_iter: int
    dynamic_loss_scale: bool
    step: Callable[..., Any]
    zero_grad: Callable[..., None]
    load_state_dict: Callable[..., Any]
    # Supplied.
    use_grad_scaling: bool
    loss_scale_config: Any
