"""The guards: what the code of DeepSpeed around the names that are used must still do, as read in DeepSpeed 0.19.8.

A guard names the file that relies on it and says what it relies on; guards.py says how it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_parity.engine.internals.guards import (
    BF16,
    ENGINE,
    FP16,
    GATHERED,
    INIT,
    PIPELINE,
    RUNTIME,
    TIMER,
    UNFUSED,
    ZERO3,
    ZERO12,
    Guard,
    missing,
)

_OF_ZERO = (ZERO12, ZERO3)
_OF_FP16 = (FP16, UNFUSED)


@dataclass(frozen=True, slots=True)
class Changed:
    """What DeepSpeed has changed.

    Attributes:
        says: a sentence.
        owner: `module:Class` of DeepSpeed.
        used_in: files that rely on it, below ds_parity/engine.
    """

    says: str
    owner: str
    used_in: str


GUARDS: tuple[Guard, ...] = (
    Guard(
        ENGINE,
        "_broadcast_model",
        "internals/broadcast.py",
        "every weight is sent from where it lies, so that one may lie in a row meanwhile",
        ("dist.broadcast(p.data",),
    ),
    Guard(
        INIT,
        "_zero_init_param",
        "internals/broadcast.py",
        "on ZeRO 3 the shape of a parameter is noted before it is sent from where it lies, and partitioned",
        ("self._convert_to_deepspeed_param(param)", "dist.broadcast(param.data", "param.partition()"),
    ),
    Guard(
        GATHERED,
        "",
        "internals/broadcast.py",
        "weights that were gathered are sent from where they lie, so that a number may lie in a row meanwhile",
        ("if self.src_rank is None:", "dist.broadcast(p.data", "for p in self.params"),
    ),
    *(
        Guard(
            wrapper,
            "initialize_optimizer_states",
            "internals/adagrad.py",
            "an Adagrad of other tensors takes the place of the one that was given, with states for these",
            (f"self.optimizer = torch.optim.Adagrad(self.{tensors}, **self.optimizer.defaults)",),
        )
        for wrapper, tensors in ((ZERO12, "single_partition_of_fp32_groups"), (ZERO3, "fp32_partitioned_groups_flat"))
    ),
    # The correction rides on the unscale: internals/zero.py.
    *(
        guard
        for wrapper in _OF_ZERO
        for guard in (
            Guard(
                wrapper,
                "_get_loss_scale",
                "internals/zero.py",
                "the loss scale is the external one while custom_loss_scaler is set, and a correction is given as such",
                ("if self.custom_loss_scaler:\n            return self.external_loss_scale",),
            ),
            Guard(
                wrapper,
                "unscale_and_clip_grads",
                "internals/zero.py",
                "the step unscales by that loss scale and by the clipping factor at once",
                ("combined_scale = clip * self.loss_scale",),
            ),
            Guard(
                wrapper,
                "step",
                "internals/zero.py",
                "the norm that is reported is the unscaled one",
                ("self._global_grad_norm = scaled_global_grad_norm / ",),
            ),
            Guard(
                wrapper,
                "finalize_gradient_accumulation_boundary",
                "internals/zero12.py and zero3.py",
                "a window can be ended without a backward, which finish() does",
                ("self.set_gradient_accumulation_boundary(True)",),
                since="0.19.5",
            ),
            Guard(
                wrapper,
                "_optimizer_step",
                "internals/zero.py",
                "the GradScaler is asked only where the wrapper keeps one, so it can be taken away for a step",
                ("if self.torch_autocast_gradscaler:",),
            ),
            Guard(
                wrapper,
                "reset_cpu_buffers",
                "internals/zero12.py and zero3.py",
                "norms of offloaded gradients are forgotten after every step, so that those which are there are the "
                "pass's",
                ("self.norm_for_param_grads = {}",),
            ),
        )
    ),
    Guard(
        "deepspeed.ops.adam.fused_adam:FusedAdam",
        "step",
        "internals/fused_adam.py",
        "its kernel is given the moments third among its lists, and the count of steps fifth behind them",
        ("[g_32, p_32, m_32, v_32]", "group['lr'], beta1, beta2, group['eps'], state['step']"),
    ),
    # A gradient that a loop writes before the step.
    Guard(
        "deepspeed.utils.tensor_fragment:",
        "",
        "internals/zero12.py and zero3.py",
        "safe_set_full_grad asks the parameter on ZeRO 1 and 2, and its optimizer on ZeRO 3",
        ("param._z3_optimizer.set_fp32_grad_for_param(value, param)", "param.set_full_hp_grad(value)"),
    ),
    # A weight or a state that a loop writes.
    Guard(
        "deepspeed.utils.tensor_fragment:",
        "",
        "internals/zero3.py",
        "safe_set_full_fp32_param and safe_set_full_optimizer_state ask the parameter's optimizer on ZeRO 3",
        (
            "param._z3_optimizer.set_full_hp_param(value, param)",
            "param._z3_optimizer.set_full_hp_param(value, param, optim_state_key)",
        ),
    ),
    Guard(
        "deepspeed.utils.mixed_precision_linkage:",
        "",
        "internals/zero12.py",
        "linking gives each parameter its own set_full_hp_grad, which is replaced behind it",
        ("lp_param.set_full_hp_grad = ",),
    ),
    Guard(
        ZERO3,
        "set_fp32_grad_for_param",
        "internals/zero3.py",
        "a rank takes its own part out of the row that it is given, which must reach as far",
        ("value.flatten().narrow(0, fp32_grad.numel() * my_rank, fp32_grad.numel())", "fp32_grad.data.copy_("),
    ),
    # What a tied layer of a pipeline has beside the weights that its stages share.
    Guard(
        "deepspeed.runtime.pipe.module:PipelineModule",
        "_index_tied_modules",
        "internals/stages.py",
        "the whole layer is marked as counted on the first of its stages",
        ("p.ds_pipe_replicated = True",),
    ),
    Guard(
        "deepspeed.runtime.pipe.module:PipelineModule",
        "_build",
        "internals/stages.py",
        "a tied layer is among the functions of a stage as it is, or, with a forward_fn, as a partial",
        (
            "self.forward_funcs.append(self.tied_modules[layer.key])",
            "self.forward_funcs.append(partial(layer.forward_fn",
        ),
    ),
    Guard(
        "deepspeed.runtime.pipe.module:PipelineModule",
        "forward",
        "internals/stages.py",
        "layers whose activations are checkpointed are called by one function of the module",
        ("self.activation_checkpoint_func(exec_range_func(start_idx, end_idx), *x)",),
    ),
    Guard(
        "deepspeed.runtime.pipe.engine:PipelineEngine",
        "_exec_reduce_tied_grads",
        "internals/stages.py",
        "the gradients of tied weights are added up over stages as the module names them",
        ("self.module.get_tied_weights_and_groups()", "weight._hp_grad if self.using_bf16_optimizer else weight.grad"),
    ),
    # Backwards that are not the engine's own.
    Guard(
        ENGINE,
        "forward",
        "internals/passing_through.py",
        "both hooks of what a forward has given are looked up on the engine in each forward",
        ("self._backward_prologue", "preprocess_per_tensor_fn=self._backward_prologue_per_tensor"),
    ),
    Guard(
        ENGINE,
        "backward",
        "internals/passing_through.py",
        "the engine knows whether a backward is its own",
        ("self._running_engine_backward = True",),
    ),
    # What is accumulated between the backwards of a window: internals/kept.py.
    Guard(
        ENGINE,
        "forward",
        "internals/zero.py",
        "a forward clears what the backward before it has left, so that this may be cleared before it",
        ("self.optimizer.clear_backward_seen_flag()", "self.module("),
        since="0.18.9",
    ),
    Guard(
        ZERO3,
        "clear_backward_seen_flag",
        "internals/zero.py",
        "after it, gradients are added to those of the passes before, and it counts a backward once",
        ("if self._epilogue_ran_this_backward:", "self.micro_step_id += 1", "super().clear_backward_seen_flag()"),
        since="0.18.9",
    ),
    Guard(
        ENGINE,
        "allreduce_gradients",
        "internals/zero12.py",
        "ZeRO 1 reduces by this call, looked up on the object, at the boundary alone",
        ("elif self.is_gradient_accumulation_boundary():", "self.optimizer.reduce_gradients("),
    ),
    Guard(
        ZERO12,
        "reduce_gradients",
        "internals/zero12.py",
        "without overlap_comm every parameter that has a gradient is reduced, in the order of the groups",
        (
            "if not self.overlap_comm:",
            "for i, group in enumerate(self.bit16_groups):",
            "if grad_reduc is not None:",
            "self.reduce_ready_partitions_and_remove_grads(param, i)",
        ),
    ),
    Guard(
        ZERO12,
        "get_gradient_for_reduction",
        "internals/zero12.py",
        "where a gradient of ZeRO 1 is accumulated",
        ("if self.use_grad_accum_attribute:", "return param.grad_accum", "return param.grad"),
    ),
    Guard(
        ZERO3,
        "zero_grad",
        "internals/zero3.py",
        "the first gradient of a window is copied where the number of the pass is 0, which zero_grad() sets",
        ("self.micro_step_id = 0",),
    ),
    Guard(
        BF16,
        "backward_prologue",
        "internals/bf16.py",
        "bf16 gradients are cleared before a backward, which must not be done between two forwards of one backward",
        ("self.clear_lp_grads()",),
    ),
    Guard(
        ENGINE,
        "_take_model_step",
        "internals/plain.py",
        "gradients are clipped before torch's optimizer steps, so that a step can be skipped in between",
        ("self.clip_fp32_gradients()", "self.optimizer.step()", "overflow = self.optimizer.overflow"),
    ),
    Guard(
        ZERO3,
        "_finalize_offload_gradient_accumulation",
        "internals/zero3.py",
        "gradient partitions are moved to the accelerator before their norms are taken",
        ("if not get_accelerator().on_accelerator(grad_buffer):", "self._offload_grad_partition_at_boundary("),
        since="0.19.5",
    ),
    Guard(
        ENGINE,
        "_get_all_ckpt_names",
        "internals/literal_paths.py",
        "files of the model are found by a pattern, made of the folder and the tag that are given",
        ("ckpt_file_pattern = self._get_ckpt_name(checkpoints_path,", "glob.glob(ckpt_file_pattern)"),
        signature=("self", "checkpoints_path", "tag"),
    ),
    Guard(
        "deepspeed.utils.zero_to_fp32:",
        "",
        "internals/literal_paths.py",
        "files of a checkpoint are found by a pattern, made of the folder that is given",
        (
            "def get_checkpoint_files(checkpoint_dir, glob_pattern):",
            "glob.glob(os.path.join(checkpoint_dir, glob_pattern))",
        ),
    ),
    Guard(
        RUNTIME + "pipe.module:PipelineModule",
        "ckpt_layer_path_list",
        "internals/literal_paths.py",
        "files of a pipeline's layers are found by a pattern, made of the folder that is given",
        ("os.path.join(ckpt_dir,", "glob.glob(layer_ckpt_path)"),
        signature=("self", "ckpt_dir", "local_layer_idx"),
    ),
    Guard(
        RUNTIME + "torch_autocast:",
        "",
        "internals/autocast.py",
        "torch_autocast is on in two globals, and in a note on each parameter of the models that it runs",
        (
            "TORCH_AUTOCAST_INITIALIZED = False",
            "TORCH_AUTOCAST_DTYPE = None",
            "setattr(p, PARAM_COMM_DTYPE_ATTR_NAME, dtype)",
            "TORCH_AUTOCAST_INITIALIZED = True",
            "TORCH_AUTOCAST_DTYPE = dtype",
        ),
        since="0.17.6",
    ),
    *(
        Guard(
            wrapper,
            "get_param_comm_dtype",
            "internals/autocast.py",
            "a backward asks a global for the dtype of a gradient, and gets what the wrapper was built for otherwise",
            (
                "if is_autocast_initialized():",
                "return get_comm_dtype(param)",
                "return self.communication_data_type",
            ),
            since="0.17.6",
        )
        for wrapper in _OF_ZERO
    ),
    *(
        Guard(
            wrapper,
            "scale_if_loss",
            "internals/zero.py",
            "a loss is scaled by the GradScaler that the wrapper keeps",
            ("return self.torch_autocast_gradscaler.scale(value)",),
        )
        for wrapper in _OF_ZERO
    ),
    Guard(
        ZERO12,
        "step",
        "internals/base.py",
        "a growing scale is read after it grew, which is why every fp16 step is corrected",
        first=("self._update_scale(self.overflow)", "self.unscale_and_clip_grads("),
    ),
    Guard(
        ENGINE,
        "_take_model_step",
        "internals/schedule.py",
        "a step moves the engine's scheduler by what a loop gives, and by the batch size where that raises a TypeError",
        ("self.lr_scheduler.step(**(lr_kwargs or {}))", "self.lr_scheduler.step(self.train_batch_size())"),
    ),
    Guard(
        ENGINE,
        "load_module_state_dict",
        "internals/unstepped.py",
        "a load copies a rank's part of each weight that is frozen just then, by its name",
        (
            "saved_frozen_params = checkpoint[FROZEN_PARAM_FRAGMENTS]",
            "param.ds_tensor.data.copy_(saved_frozen_params[name].data)",
        ),
    ),
    Guard(
        ENGINE,
        "_get_zero_frozen_param_attributes",
        "internals/unstepped.py",
        "a save has a rank's part of each weight that is frozen just then, by its name",
        ("frozen_param_fragments[name] = attr_func(param)",),
    ),
    # Pipelines: pipeline.py and internals/stages.py.
    Guard(
        PIPELINE,
        "_exec_forward_pass",
        "pipeline.py",
        "the last stage takes its loss from the module's loss_fn, once for each micro-batch, in their order",
        ("self.loss = self.module.loss_fn(outputs, labels)",),
    ),
    Guard(
        PIPELINE,
        "_exec_optimizer_step",
        "internals/stages.py",
        "a pipeline steps as any engine does, which clips fp32 gradients by a method that is looked up on the object",
        ("self._take_model_step(lr_kwargs)",),
    ),
    Guard(
        PIPELINE,
        "_recv_tensor_meta",
        "internals/stages.py",
        "what a stage receives in is made by a method that is looked up on the object, with the tensor's own type",
        ("buffers.append(self._allocate_or_extend_buffers(idx, recv_shape, recv_dtype))",),
    ),
    Guard(
        ENGINE,
        "load_checkpoint",
        "internals/stages.py",
        "files of the optimizer are loaded, or its weights taken from the model, where there is ZeRO, and only there",
        ("load_zero_checkpoint = load_path is not None and self.zero_optimization()",),
    ),
    Guard(
        ENGINE,
        "load_checkpoint",
        "internals/swapped.py",
        "nothing of the optimizer is loaded where its states lie on NVMe, which is refused; if this fails, it may be "
        "right now",
        ("if load_zero_checkpoint and not self.zero_nvme_offload_optimizer():",),
    ),
    # Checkpoints.
    *(
        Guard(
            ENGINE,
            method,
            "internals/checkpoints.py",
            "files are written by methods that are looked up on the checkpoint engine, so that what they raise is kept",
            (line,),
        )
        for method, line in (
            ("save_checkpoint", "self.checkpoint_engine.makedirs(save_dir, exist_ok=True)"),
            ("_save_checkpoint", "self.checkpoint_engine.save("),
            ("_save_zero_checkpoint", "self.checkpoint_engine.save("),
            ("_save_zero_checkpoint", "self._copy_recovery_script("),
        )
    ),
    *(
        Guard(
            ENGINE,
            method,
            "internals/identity.py",
            "each file that has the configuration takes it from the engine, and is loaded by the checkpoint engine",
            (line,),
        )
        for method, line in (
            ("_save_zero_checkpoint", "ds_config=self.config"),
            ("_get_all_zero_checkpoint_state_dicts", "self.checkpoint_engine.load("),
        )
    ),
    Guard(
        f"{ENGINE.partition(':')[0]}:",
        "",
        "internals/sequence_checkpoints.py",
        "how many tensor-parallel ranks a checkpoint has is asked of the engine's mpu, by this function alone",
        ("def _checkpoint_parallel_metadata(mpu):", "**_checkpoint_parallel_metadata(self.mpu)"),
        since="0.19.8",
    ),
    # Other wrappers.
    *(
        guard
        for wrapper in _OF_FP16
        for guard in (
            Guard(
                wrapper,
                "_update_scale",
                "internals/fp16.py",
                "a dynamic scale moves by this method alone, which is called after the step in which it stood still",
                ("if self.loss_scale_config.dynamic_loss_scale:", "self.loss_scale_config.cur_iter += 1"),
                since="0.18.9",
            ),
            Guard(
                wrapper,
                "unscale_and_clip_grads",
                "internals/fp16.py",
                "the step unscales by loss_scale_config.cur_scale, on which a correction rides",
                ("combined_scale = self.loss_scale_config.cur_scale",),
                since="0.18.9",
            ),
        )
    ),
    Guard(
        FP16,
        "step",
        "internals/fp16.py",
        "the fused wrapper reports the unscaled norm, so only the unfused one's is put right",
        ("self._global_grad_norm = scaled_global_grad_norm / self.loss_scale_config.cur_scale",),
        since="0.18.9",
    ),
    Guard(
        UNFUSED,
        "step",
        "internals/fp16.py",
        "the unfused wrapper reports the norm of gradients as they came in, which is put right",
        ("self._global_grad_norm = get_global_norm(norm_list=norm_groups)",),
    ),
    Guard(
        UNFUSED,
        "step",
        "internals/fp16.py",
        "the unfused wrapper clips by a norm without experts, in a method that is looked up on the object",
        ("grads_for_norm, _ = split_params", "self.unscale_and_clip_grads(self._global_grad_norm)"),
    ),
    Guard(
        ENGINE,
        "backward",
        "internals/fp16.py",
        "the loss is scaled for ZeRO wrappers and for autocast on ZeRO 0 alone; if it were for fp16 on ZeRO 0 too, "
        "unscaled_loss_scale would scale it twice",
        absent=("loss_scale_config",),
        once=("scale_if_loss(", "gradscaler.scale("),
    ),
    Guard(
        ENGINE,
        "_get_optimizer_loss_scale",
        "internals/base.py",
        "the fp16 loss scale is where DeepSpeed logs it from",
        ("self.optimizer.loss_scale_config.cur_scale", 'getattr(self.optimizer, "cur_scale", None)'),
        since="0.18.9",
    ),
    Guard(
        BF16,
        "_setup_for_real_optimizer",
        "internals/bf16.py",
        "the gradients of which the norm is taken, and by which the optimizer steps, are views of the flat buffers "
        "that are corrected",
        (
            "self._split_flat_tensor(flat_tensor=self.fp32_groups_gradients_flat[i]",
            "torch.narrow(self.fp32_groups_gradients_flat[i], 0, 0, length_without_padding)",
            "torch.narrow(self.fp32_groups_gradients_flat[i], 0, partition_id * partition_size, partition_size)",
        ),
    ),
    Guard(
        BF16,
        "_update_hp_grad",
        "internals/bf16.py",
        "which parameters have a gradient on this rank is noted where the norm asks for it",
        ("self.fp32_groups_has_gradients[group_idx][param_idx] = True",),
    ),
    Guard(
        ENGINE,
        "clip_fp32_gradients",
        "internals/plain.py",
        "fp32 gradients on ZeRO 0 are clipped by this call, which is repeated so that its norm is kept",
        ("clip_grad_norm_(parameters=self.module.parameters(), max_norm=self.gradient_clipping(), mpu=self.mpu)",),
        absent=("return",),
    ),
    Guard(
        ENGINE,
        "_take_model_step",
        "internals/plain.py",
        "a step of autocast on ZeRO 0 goes through the engine's GradScaler, and counts as skipped by "
        "optimizer.overflow",
        (
            "self.torch_autocast_z0_gradscaler.step(self.optimizer)",
            'if hasattr(self.optimizer, "overflow"):\n            overflow = self.optimizer.overflow',
        ),
    ),
    # Windows: what is reduced, left out and thrown away.
    Guard(
        ENGINE,
        "_flush_coalesced_reduction_zero12",
        "internals/zero12.py",
        "DeepSpeed itself ends a boundary without its backward so, and _reduce_without_a_backward does the same",
        (
            "optimizer.reduction_stream.synchronize()",
            "optimizer.setup_buckets()",
            "if optimizer.get_gradient_for_reduction(param) is None:",
            "optimizer.reduce_ready_partitions_and_remove_grads(param, i)",
            "optimizer.overlapping_partition_gradients_reduce_epilogue()",
        ),
        since="0.19.3",
    ),
    Guard(
        ZERO12,
        "setup_buckets",
        "internals/zero12.py",
        "buckets are set up and passes counted in one place",
        ("self.micro_step_id += 1",),
    ),
    Guard(
        ZERO12,
        "get_gradient_for_reduction",
        "internals/zero12.py",
        "it says which parameters have a gradient, where idle passes ask",
        ("return param.grad_accum", "else:\n            return param.grad"),
    ),
    Guard(
        ENGINE,
        "_configure_distributed_model",
        "internals/base.py",
        "the engine knows of experts, whose idle passes can't be left out, and remembers an mpu for later engines, "
        "which groups.py refuses",
        ("has_moe_layers", "groups.mpu = self.mpu"),
    ),
    Guard(
        ZERO3,
        "partition_grads",
        "internals/zero3.py",
        "partitions are copied to the host at the boundary alone, and what a window used is recorded there",
        (
            "params_to_release: List[Parameter], grad_partitions: List[Tensor]",
            "self._offload_boundary_param_ids.add(param.ds_id)",
            "grad_buffer = self.__param_id_to_grad_partition[param.ds_id]",
            "if self.offload_optimizer:",
        ),
        since="0.19.5",
    ),
    Guard(
        ZERO3,
        "partition_grads",
        "internals/zero3.py",
        "a gradient is copied where the number of the pass is 0, and added elsewhere, so that one which comes twice in "
        "the first pass can be added",
        (
            "for param, grad_partition in zip(params_to_release, grad_partitions):",
            "if self.micro_step_id == 0:  # don't accumulate",
            "elif get_accelerator().on_accelerator(grad_buffer):",
        ),
    ),
    Guard(
        RUNTIME + "zero.partition_parameters:",
        "",
        "internals/zero3.py",
        "zero.Init gives every parameter a number, its whole size, and the size of a partition",
        ("param.ds_numel = param.numel()", "param.ds_id = ", "param.partition_numel = partition_numel"),
    ),
    Guard(
        "deepspeed.utils.tensor_fragment:",
        "",
        "../all_weights.py",
        "master weights are assembled on ZeRO 1 to 3 and in bf16, on every rank, and are None elsewhere",
        (
            "def safe_get_full_fp32_param(param):",
            "if hasattr(param, 'ds_id'):",
            "return param._z3_optimizer.get_full_hp_param(param)",
            "if hasattr(param, '_hp_mapping'):",
            "return param.get_full_hp_param()",
            "return None",
        ),
    ),
    Guard(
        ZERO3,
        "_pre_step",
        "internals/zero3.py",
        "what a window used is forgotten at its step",
        ("self.micro_step_id = 0", "self._offload_boundary_param_ids = set()"),
        since="0.19.5",
    ),
    Guard(
        ZERO3,
        "_offload_grad_partition_at_boundary",
        "internals/zero3.py",
        "it takes one gradient partition to the host",
        signature=("self", "param", "grad_buffer", "offload_fp32_gradients", "offload_fp32_offsets"),
        since="0.19.5",
    ),
    Guard(
        ZERO12,
        "_finalize_cpu_offload_gradient_accumulation",
        "internals/zero12.py",
        "ZeRO 1 and 2 finish an offloaded window parameter by parameter, as complete() does for the rest",
        (
            "not in self._offload_accumulated_param_ids",
            "self.copy_grads_in_partition(param, group_idx)",
            "self._restore_cpu_offload_grad_to_gpu(param)",
            "self.set_norm_for_param_grad_in_gpu(param)",
            "self.update_offload_overflow_tracker_for_param_grad(param)",
            "self.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)",
        ),
        since="0.19.8",
    ),
    Guard(
        ZERO12,
        "step",
        "internals/zero12.py",
        "discard() does what ZeRO 1 and 2 do on an overflow",
        (
            "self.micro_step_id = INITIAL_MICRO_STEP_ID",
            "self.zero_grad(set_to_none=True)",
            "self.reset_cpu_buffers()",
            "self.averaged_gradients[k] = None",
            "self.all_grad_tensors[k] = None",
        ),
    ),
    Guard(
        ZERO3,
        "step",
        "internals/zero3.py",
        "discard() and release_parameters() do what ZeRO 3's step does first",
        first=("self._pre_step()", "self._partition_all_parameters()", "overflow"),
    ),
    Guard(
        ZERO3,
        "_overflow_clean_up",
        "internals/zero3.py",
        "discard() ends with it",
        signature=("self", "prev_scale"),
    ),
    # Counters, monitors and schedules.
    Guard(
        ENGINE,
        "_take_model_step",
        "internals/counters.py",
        "each step adds the fixed batch size to global_samples, which before_step takes off",
        ("self.global_samples += self.train_batch_size()",),
    ),
    Guard(
        ENGINE,
        "step",
        "internals/counters.py",
        "each call adds one to micro_steps, which settle() replaces by the passes",
        ("self.micro_steps += 1",),
    ),
    Guard(
        ENGINE,
        "_start_timers",
        "internals/timers.py",
        "wall-clock timers are started by their names, each of which is one timer",
        ("for name in timer_names:", "self.timers(name).start()"),
    ),
    Guard(
        ENGINE,
        "_stop_timers",
        "internals/timers.py",
        "wall-clock timers are stopped by their names",
        ("for name in timer_names:", "self.timers(name).stop("),
    ),
    Guard(
        TIMER,
        "stop",
        "internals/counters.py",
        "the timer has one batch size, and closes its step at a boundary",
        (
            "if self.start_time > 0:",
            "self.total_elapsed_time += duration",
            "if global_step:",
            "self.batch_size / (self.step_elapsed_time + TIME_EPSILON)",
            "self.step_elapsed_time = 0",
        ),
    ),
    Guard(
        ENGINE,
        "step",
        "internals/monitor.py",
        "the monitor gets the LR and the loss scale; a name that is new here could appear twice in a monitor",
        all_of=(r"Train/\w+/\w+", ("Train/Samples/lr", "Train/Samples/loss_scale")),
        since="0.19.3",
    ),
    Guard(
        RUNTIME + "engine:",
        "",
        "internals/monitor.py",
        "DeepSpeed writes no loss, so the one that is written here appears once",
        absent=("Train/Samples/train_loss",),
    ),
    # Sequence parallelism; the figures are measured in tests/distributed.
    Guard(
        ENGINE,
        "_reduce_non_expert_gradients",
        "internals/base.py",
        "ZeRO 0 divides by all ranks over the sequence-parallel size",
        ("dp_world_size = dist.get_world_size(dp_group) / float(self.sequence_parallel_size)",),
    ),
    Guard(
        ENGINE,
        "_reduce_expert_gradients",
        "internals/base.py",
        "experts are divided by all data-parallel ranks, as the rest is, so that one correction is for both",
        ("dp_world_size = dist.get_world_size(groups._get_data_parallel_group())",),
    ),
    Guard(
        ZERO12,
        "average_tensor",
        "internals/base.py",
        "ZeRO 1 and 2 divide by all ranks over the sequence-parallel size",
        ("dist.get_world_size(group=self.dp_process_group) / float(self.sequence_parallel_size)",),
    ),
    Guard(
        RUNTIME + "comm.coalesced_collectives:",
        "",
        "internals/zero3.py",
        "ZeRO 3 divides by all ranks",
        ("tensor_partition_flat_buffer.div_(world_sz)",),
    ),
    Guard(
        ZERO3,
        "_get_param_partition_group",
        "internals/groups.py",
        "ZeRO 3 parameters name the group that their gradients are summed over",
        ("ds_process_group",),
        since="0.19.3",
    ),
    Guard(
        BF16,
        "get_grads_for_norm",
        "internals/groups.py",
        "the wrapper takes no norm on later ranks of a model-parallel group, which is refused where that is the "
        "sequence-parallel one; if this fails, it may be right now",
        ("tensor_mp_rank = bwc_tensor_model_parallel_rank(mpu=self.mpu)",),
    ),
    # AutoTP; the steps are measured in tests/distributed/test_autotp.py and in the matrix.
    Guard(
        ENGINE,
        "_configure_tensor_parallel_states",
        "internals/tensor_groups.py",
        "AutoTP replaces the mpu by groups of its own, so that one that is given is refused",
        ("self.mpu = groups", "self.mpu._init_tp_mesh_device(tensor_model_parallel_size=self.autotp_size())"),
        since="0.19.8",
    ),
    Guard(
        ENGINE,
        "save_16bit_model",
        "internals/tensor_groups.py",
        "below ZeRO 3 it writes what module_state_dict() of the first rank gives",
        ("state_dict = self.module_state_dict(",),
        since="0.19.8",
    ),
    Guard(
        RUNTIME + "config:DeepSpeedConfig",
        "print_user_config",
        "internals/tensor_groups.py",
        "a group in the configuration is no JSON, so that one for tp_model_init is refused",
        ("json.dumps(\n                self._param_dict,",),
        since="0.19.8",
    ),
    Guard(
        "deepspeed.utils.groups:",
        "",
        "internals/tensor_groups.py",
        "groups of AutoTP are made once a process, and those of another size are refused",
        ("if _TENSOR_MODEL_PARALLEL_GROUP is not None:\n        return",),
        since="0.19.8",
    ),
    Guard(
        RUNTIME + "tensor_parallel.init_utils:",
        "",
        "internals/tensor_groups.py",
        "tp_model_init() records a size and a group, which enter every later configuration",
        ("_TP_MODEL_INIT_ARGS = None", '"tp_size": tp_size', '"tp_group": tp_group', "config_autotp_size is None"),
        since="0.19.8",
    ),
    Guard(
        UNFUSED,
        "step",
        "internals/tensor_groups.py",
        "the norm is that of gradients, which carry no mark of AutoTP, so that later ranks leave all of them out, and "
        "it is refused; if this fails, it may be right now",
        ("get_weight_norm(grads_for_norm, mpu=self.mpu)",),
        since="0.19.8",
    ),
    Guard(
        "deepspeed.module_inject.auto_tp:AutoTP",
        "register_replicated_grad_hooks",
        "internals/tensor_groups.py",
        "gradients of norms of heads are summed over AutoTP ranks where a plan names them, and marked then",
        ("self.partition_config is None", "param._ds_grad_allreduce_registered = True"),
        since="0.19.8",
    ),
    Guard(
        RUNTIME + "config:DeepSpeedConfig",
        "__init__",
        "internals/tensor_groups.py",
        "the batch is checked by all ranks, AutoTP's too, so none is written there",
        ("self.world_size = dist.get_world_size()",),
    ),
)


def changed() -> list[Changed]:
    """Return every guard that fails, and every name that is gone."""
    gone = (Changed(str(one), one.owner, one.used_in) for one in missing())
    failing = (Changed(said, g.owner, g.used_in) for g in GUARDS if (said := g.changed()) is not None)
    return [*gone, *failing]
