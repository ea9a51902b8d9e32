"""The keys that DeepSpeed reads from its configuration, as `python -m tools.deepspeed_keys` prints them.

tests/config/test_misspelt.py checks this table against the DeepSpeed that is installed.
"""

from typing import Final

VERSION: Final = "0.19.8"

KEYS: Final[dict[str, frozenset[str]]] = {
    "": frozenset(
        "activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger "
        "communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency "
        "data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state "
        "eigenvalue elasticity expert_parallel flops_profiler fp16 gradient_accumulation_steps "
        "gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine "
        "log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients "
        "progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type sparse_attention "
        "sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size "
        "train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown "
        "wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization".split()
    ),
    "activation_checkpointing": frozenset(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile "
        "synchronize_checkpoint_boundary".split()
    ),
    "aio": frozenset("block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds".split()),
    "bf16": frozenset(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split()
    ),
    "bfloat16": frozenset(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split()
    ),
    "checkpoint": frozenset(
        "checkpoint_serialization load_universal parallel_write tag_validation use_node_local_storage writer".split()
    ),
    "checkpoint.parallel_write": frozenset("pipeline_stage".split()),
    "checkpoint.writer": frozenset(
        "data_parallel decoupled io_buffer_double io_buffer_size io_multiplier show_statistics type".split()
    ),
    "comet": frozenset(
        "api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace".split()
    ),
    "comms_logger": frozenset("debug enabled prof_all prof_ops verbose".split()),
    "compile": frozenset(
        "autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold "
        "keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory "
        "offload_opt_states offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce "
        "sync_before_allgather sync_before_reduce".split()
    ),
    "csv_monitor": frozenset("enabled job_name output_path".split()),
    "data_types": frozenset("buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype".split()),
    "flops_profiler": frozenset(
        "detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules".split()
    ),
    "fp16": frozenset(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power "
        "loss_scale loss_scale_window min_loss_scale".split()
    ),
    "hybrid_engine": frozenset(
        "enable_cuda_graph enabled inference_tp_size max_out_tokens pin_parameters release_inference_cache "
        "tp_gather_partition_size".split()
    ),
    "optimizer": frozenset("legacy_fusion params type".split()),
    "scheduler": frozenset("params type".split()),
    "tensor_parallel": frozenset(
        "autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model "
        "replace_with_kernel_inject tensor_parallel tp tp_overlap_comm vocab_parallel_ce_backend "
        "vocab_parallel_lm_head".split()
    ),
    "tensorboard": frozenset("enabled job_name output_path".split()),
    "timers": frozenset("throughput".split()),
    "torch_autocast": frozenset("dtype enabled lower_precision_safe_modules".split()),
    "wandb": frozenset("enabled group project team".split()),
    "zero_optimization": frozenset(
        "allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients "
        "cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks "
        "gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 "
        "load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance "
        "memory_efficient_linear mics_hierarchical_params_gather mics_shard_size model_persistence_threshold "
        "module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply "
        "param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size "
        "reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage "
        "stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params "
        "sub_group_size use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow "
        "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights zeropp_loco_param".split()
    ),
    "zero_optimization.leaf_module": frozenset("classes name_suffixes names".split()),
    "zero_optimization.offload_optimizer": frozenset(
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio "
        "super_offload".split()
    ),
    "zero_optimization.offload_param": frozenset(
        "buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split()
    ),
    "zero_optimization.zenflow": frozenset(
        "auto_ratio full_warm_up_rounds offload overlap_step pt_reserved_cores_perc select_interval "
        "select_strategy steps_per_epoch topk_ratio update_interval".split()
    ),
}
"""By the path of the section, "" for the top level."""

OPTIMIZERS: Final = frozenset(
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam "
    "adagrad adam adamw lamb lion muadam muadamw muon musgd".split()
)
"""Types of optimizers: DeepSpeed's own in lower case, torch's as they are written."""

SCHEDULERS: Final = frozenset(
    "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LRRangeTest "
    "LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycle OneCycleLR PolynomialLR ReduceLROnPlateau "
    "SequentialLR StepLR WarmupCosineLR WarmupDecayLR WarmupLR".split()
)
"""Types of schedulers, DeepSpeed's own and torch's."""
