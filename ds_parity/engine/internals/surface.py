"""All that ds_parity uses of DeepSpeed's engine and of its optimizer wrappers, public and private, as protocols.

mypy refuses any other attribute in this room, so these protocols are the complete list; guards.py holds what each name
must mean, and tests/engine/test_internals.py fails by name where a DeepSpeed release changes it. They were read in
DeepSpeed 0.19.8: runtime/engine.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/bf16_optimizer.py,
runtime/fp16/fused_optimizer.py, runtime/fp16/unfused_optimizer.py and utils/timer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Parameter = torch.nn.Parameter


class ThroughputTimer(Protocol):
    """What DeepSpeed measures samples a second with."""

    batch_size: int
    start_time: float
    step_elapsed_time: float
    total_elapsed_time: float
    avg_samples_per_sec: Callable[[], float]


class WallClockTimer(Protocol):
    """One of the timers of `wall_clock_breakdown`."""

    started_: bool


class EngineTimers(Protocol):
    """The names of those that run, none where the configuration asks for none."""

    backward_timers: list[str]
    backward_inner_timers: list[str]


class Monitor(Protocol):
    """DeepSpeed's MonitorMaster: tensorboard, csv, wandb and comet together."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write numbers by name and sample."""


class CheckpointEngine(Protocol):
    """What writes DeepSpeed's files."""

    makedirs: Callable[..., Any]
    create: Callable[..., Any]
    save: Callable[..., Any]
    commit: Callable[..., Any]
    load: Callable[..., Any]

    def is_decoupled(self) -> bool:
        """Whether files are written behind the caller's back, `latest` among them."""


class GradScaler(Protocol):
    """torch.amp.GradScaler, as `torch_autocast` in fp16 uses it."""

    def get_scale(self) -> float:
        """The scale of losses."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale, which is made where there is none yet."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients, and look for an overflow in them."""

    def update(self) -> None:
        """Move the scale: down after an overflow, up after many steps without one."""

    def state_dict(self) -> dict[str, Any]:
        """The scale, and what moves it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a scale, also where none was used yet."""


class Engine(Protocol):
    """A DeepSpeed engine."""

    # Public, or used as such everywhere.
    module: torch.nn.Module
    optimizer: Any  # an adapter gives it its own type
    lr_scheduler: Any
    device: torch.device | str
    mpu: Any
    monitor: Monitor
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
    data_parallel_group: Any
    seq_data_parallel_group: Any
    seq_parallel_group: Any
    sequence_parallel_size: int

    # DeepSpeed's own.
    basic_optimizer: Any
    config: Any  # what it was given: a dictionary, or None
    checkpoint_engine: CheckpointEngine
    gradient_average: bool
    has_moe_layers: bool
    inside_no_sync_ctxt: bool
    torch_autocast_z0_gradscaler: GradScaler | None
    timers: Callable[[str], WallClockTimer]
    engine_timers: EngineTimers
    tput_timer: ThroughputTimer
    clip_fp32_gradients: Callable[[], None]
    torch_autocast_enabled: Callable[[], bool]
    _global_grad_norm: Any
    _running_engine_backward: bool

    def backward(self, loss: torch.Tensor, retain_graph: bool = ..., scale_wrt_gas: bool = ...) -> Any:
        """Run a backward; ZeRO 2 and 3 reduce in each, ZeRO 0 and 1 in the boundary's."""

    def step(self, lr_kwargs: Any = None) -> None:
        """Update at a boundary, count in any case."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming step, or the backward before it, is the window's last."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward and step end a window."""

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce once at the end of the block, for all of its backwards; ZeRO 1 to 3."""

    def autotp_size(self) -> int:
        """How many ranks hold a part of the model each; 0 or 1 where AutoTP is off."""

    def module_state_dict(self, exclude_frozen_parameters: bool = ...) -> dict[str, Any]:
        """What this rank has of the model's state, by name."""

    def zero_optimization(self) -> bool:
        """Whether there is ZeRO: on stages 1 to 3."""

    def zero_optimization_stage(self) -> int:
        """0 to 3."""

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are partitioned: ZeRO 2 and 3."""

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's states lie on NVMe: on ZeRO 3 alone."""

    def zero_reduce_scatter(self) -> bool:
        """The configuration's reduce_scatter."""

    def gradient_predivide_factor(self) -> float:
        """The configuration's factor."""

    def gradient_clipping(self) -> float:
        """The configuration's limit, 0 for none."""

    def bfloat16_enabled(self) -> bool:
        """Whether the section bf16 is on; parameters may be bf16 without it."""

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""

    def _get_ckpt_name(self, checkpoints_path: str, tag: str) -> str:
        """Return the path of this rank's file of the model."""

    def _get_zero_ckpt_name(self, checkpoints_path: str, tag: str) -> str:
        """Return the path of this rank's file of the optimizer's states."""

    def gradient_accumulation_steps(self) -> int:
        """What DeepSpeed was configured with."""

    def train_batch_size(self) -> int:
        """What each step adds to `global_samples`."""

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""

    def get_global_grad_norm(self) -> Any:
        """The norm before clipping; None where none was taken."""

    def was_step_applied(self) -> bool:
        """Whether the last step moved the weights."""

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce what is accumulated."""

    def zero_grad(self) -> None:
        """Clear the gradients of parameters."""

    def _backward_prologue(self) -> None:
        """Begin a backward, in a hook of what a forward of the engine has given."""

    def _backward_prologue_per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Divide a gradient of what a forward has given, unless the loss was divided."""

    def _start_timers(self, timer_names: Iterable[str]) -> None:
        """Start wall-clock timers, each of which must rest."""

    def _stop_timers(self, timer_names: Iterable[str]) -> None:
        """Stop wall-clock timers, each of which must run."""

    def _copy_recovery_script(self, save_path: str) -> None:
        """Copy the scripts that collect weights beside a checkpoint."""

    def load_universal_checkpoint(self) -> bool:
        """Whether the configuration loads universal checkpoints."""

    def save_checkpoint(self, save_dir: str, tag: Any, client_state: Any, save_latest: bool, exclude: bool) -> Any:
        """Save."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load; return the path and the client state."""


class ZeroOptimizer(Protocol):
    """What ZeRO 1 to 3 have in common."""

    cur_scale: float
    custom_loss_scaler: bool
    external_loss_scale: float | None
    loss_scale: float
    overflow: bool
    torch_autocast_gradscaler: GradScaler | None
    communication_data_type: torch.dtype
    get_param_comm_dtype: Callable[[Any], torch.dtype]
    norm_for_param_grads: MutableMapping[int, Any]

    def get_param_id(self, param: Parameter | Zero12Parameter | Zero3Parameter) -> int:
        """The number of a parameter."""

    def clear_backward_seen_flag(self) -> None:
        """End a backward: `engine.forward` calls it at its start."""

    def finalize_gradient_accumulation_boundary(self) -> None:
        """End a window whose gradients are partitioned, without a backward."""


class Zero12Parameter(Protocol):
    """A parameter whose optimizer states are divided over ranks."""

    _hp_mapping: Any
    load_hp_checkpoint_state: Callable[..., Any] | None

    def set_full_hp_grad(self, value: torch.Tensor) -> None:
        """Write a loop's own gradient of a step: `safe_set_full_grad`."""


class LinkedOptimizer(Protocol):
    """A wrapper of ZeRO 1 or 2, which links parameters to their part of what it steps."""

    _hp_optimizer_states_linked: bool

    def _link_all_hp_params(self) -> None:
        """Link every parameter to its part of the weights in fp32, and to the gradient of that."""

    def _restore_from_bit16_weights(self) -> None:
        """Copy the model's weights to those in fp32 that this rank steps."""

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Link every parameter to its part of the optimizer's states, the first time."""


class Zero12Optimizer(ZeroOptimizer, LinkedOptimizer, Protocol):
    """DeepSpeedZeroOptimizer: ZeRO 1 and 2."""

    cpu_offload: bool
    overlap_comm: bool
    use_grad_accum_attribute: bool
    micro_step_id: int
    reduction_stream: Any
    bit16_groups: Iterable[Iterable[Parameter]]
    params_in_partition: Iterable[Iterable[Parameter]]
    averaged_gradients: MutableMapping[int, Any]
    all_grad_tensors: MutableMapping[int, Any]
    accumulated_grads_in_cpu: Mapping[int, torch.Tensor]
    single_partition_of_fp32_groups: Any
    grad_position: Mapping[int, tuple[int, int, int, int]]
    _offload_accumulated_param_ids: set[int]

    def update_lp_params(self) -> None:
        """Copy the weights that this rank steps to the model's, and gather those of the others."""

    def zero_grad(self, set_to_none: bool = ...) -> None:
        """Clear the gradients of parameters."""

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Give the parameters of a group their places in its flat buffer."""

    def reset_cpu_buffers(self) -> None:
        """Forget the norms and overflows of offloaded gradients."""

    def setup_buckets(self) -> None:
        """Begin a pass."""

    def get_gradient_for_reduction(self, param: Parameter) -> torch.Tensor | None:
        """What a parameter has accumulated."""

    def _fill_param_grad_accum_attribute(self, param: Parameter) -> None:
        """Add a parameter's gradient to what it has accumulated in another precision."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Reduce what is accumulated: ZeRO 1, at the boundary."""

    def reduce_ready_partitions_and_remove_grads(self, param: Parameter, i: int) -> None:
        """Reduce a parameter's gradient, as its hook does."""

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """End a boundary's reductions."""

    def _use_compact_grad_partition_buffer(self, i: int) -> bool:
        """Whether a group's gradients lie in one buffer."""

    def copy_grads_in_partition(self, param: Parameter, group_idx: int) -> None:
        """Copy a gradient into that buffer."""

    def _restore_cpu_offload_grad_to_gpu(self, param: Parameter) -> None:
        """Bring an accumulated gradient back from the host."""

    def set_norm_for_param_grad_in_gpu(self, param: Parameter) -> None:
        """Take a gradient's norm."""

    def update_offload_overflow_tracker_for_param_grad(self, param: Parameter) -> None:
        """Look for an overflow in a gradient."""

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: Parameter) -> None:
        """Give a gradient to the optimizer."""


class ExpertLayer(Protocol):
    """What is inside DeepSpeed's own layer of experts (`MoE`)."""

    ep_group: Any
    ep_size: int
    experts: torch.nn.Module


class Zero3Parameter(Protocol):
    """A parameter that zero.Init has partitioned."""

    ds_id: int
    ds_numel: int
    ds_shape: torch.Size
    ds_z3_leaf_module: torch.nn.Module  # of those that are in a leaf module alone
    ds_secondary_tensor: torch.Tensor | None
    requires_grad: bool

    def partition_numel(self) -> int:
        """How many elements each rank's partition has, padding included."""


class Zero3Optimizer(ZeroOptimizer, Protocol):
    """DeepSpeedZeroOptimizer_Stage3."""

    offload_optimizer: bool
    micro_step_id: int
    fp16_groups: Iterable[Iterable[Zero3Parameter]]
    sub_group_to_group_id: Mapping[int, int]
    _offload_boundary_param_ids: set[int]
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: Mapping[int, torch.Tensor]

    def partition_grads(self, params_to_release: list[Zero3Parameter], grad_partitions: list[torch.Tensor]) -> Any:
        """Copy reduced gradients into their partitions in the first pass, and add them in the later ones."""

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Zero3Parameter) -> None:
        """Write a loop's own gradient of a step: `safe_set_full_grad`."""

    def set_full_hp_param(self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None) -> None:
        """Write a weight or a state: `safe_set_full_fp32_param`, `safe_set_full_optimizer_state`."""

    def set_local_hp_param(
        self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None
    ) -> None:
        """Write this rank's partition of one."""

    def _get_param_partition_rank(self, param: Zero3Parameter) -> int:
        """This rank among those that share a parameter."""

    def _offload_grad_partition_at_boundary(
        self,
        param: Zero3Parameter,
        grad_buffer: torch.Tensor,
        offload_fp32_gradients: dict[int, Any],
        offload_fp32_offsets: dict[int, Any],
    ) -> None:
        """Give one gradient partition to the optimizer on the host."""

    def _swap_out_offload_fp32_gradients(self, gradients: dict[int, Any], offsets: dict[int, Any]) -> None:
        """Write those that are swapped."""

    def _partition_all_parameters(self) -> None:
        """Partition what forwards and backwards left gathered."""

    def _pre_step(self) -> None:
        """Forget what the window used."""

    def _overflow_clean_up(self, prev_scale: float) -> None:
        """Throw gradients away."""


class Bf16Optimizer(LinkedOptimizer, Protocol):
    """BF16_Optimizer: ZeRO 1 in bf16 with fp32 accumulation."""

    backward_prologue: Callable[[], None]
    immediate_grad_update: bool
    bf16_groups: Iterable[Iterable[Parameter]]
    fp32_groups_gradients: Sequence[Sequence[torch.Tensor]]
    fp32_groups_gradients_flat: Iterable[torch.Tensor]
    fp32_groups_has_gradients: list[list[bool]]
    fp32_groups_flat_partition: Sequence[torch.Tensor]

    def update_lp_params(self) -> None:
        """Copy the weights that this rank steps to the model's, and gather those of the others."""

    def load_state_dict(self, state_dict_list: Any, **options: Any) -> None:
        """Load what each rank has saved."""

    def refresh_fp32_params(self) -> None:
        """Copy the model's weights to those in fp32."""

    def accumulate_hp_grads_and_remove_lp(self, lp_param: Parameter, group_idx: int, param_idx: int) -> None:
        """Add the bf16 gradient that has just come in to the fp32 one."""

    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """The fp32 gradients that count in the norm, or all that are clipped: of those that have one."""

    def clear_hp_grads(self) -> None:
        """Clear the fp32 gradients."""

    def clear_lp_grads(self) -> None:
        """Clear the bf16 gradients."""


class AdamOptimizer(Protocol):
    """FusedAdam: DeepSpeed's Adam without CPU offload, inside the wrapper."""

    adam_w_mode: int
    multi_tensor_adam: Callable[..., Any]


class LossScaleConfig(Protocol):
    """Where FP16_Optimizer and FP16_UnfusedOptimizer keep their loss scale."""

    cur_scale: float
    cur_iter: int
    dynamic_loss_scale: bool
    use_grad_scaling: bool


class LowPrecisionOptimizer(Protocol):
    """FP16_Optimizer and FP16_UnfusedOptimizer: ZeRO 0 in fp16 and bf16."""

    fp16_groups: Iterable[Iterable[Parameter]]
    loss_scale_config: LossScaleConfig
    overflow: bool
    _global_grad_norm: Any

    def _update_scale(self, skip: bool) -> None:
        """Move a dynamic scale by what the step came to."""

    def refresh_fp32_params(self) -> None:
        """Copy the model's weights to those in fp32."""

    def unscale_and_clip_grads(self, total_norm: float, apply_scale: bool = ...) -> float:
        """Divide the gradients in fp32 by the loss scale and by what clipping asks for; the unfused wrapper's."""


class Grid(Protocol):
    """PipelineParallelGrid: which ranks have which stage of a pipeline."""

    def get_pipe_parallel_group(self) -> Any:
        """The ranks that share a micro-batch: all stages of a column."""


class Pipeline(Protocol):
    """PipelineEngine."""

    grid: Grid
    global_rank: int
    _allocate_or_extend_buffers: Callable[..., Any]


class Stages(Protocol):
    """PipelineModule."""

    tied_comms: Mapping[str, Mapping[str, Any]]
    tied_modules: Mapping[str, Any]
    stage_id: int
    num_stages: int
    tied_weight_attrs: Mapping[str, Sequence[str]]
    _synchronize_tied_weights: Callable[..., Any]
    activation_checkpoint_func: Callable[..., Any]
    _layer_specs: Sequence[Any]

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""


class TiedSpec(Protocol):
    """TiedLayerSpec."""

    key: str
