"""What engine/internals/normalize.py, schedule.py, leftout.py, counters.py and monitoring.py rely on inside DeepSpeed, as read in 0.19.8.

Each failure here says what changed and what has to be read again before the version is supported.
"""

import ast
import inspect
import re
import textwrap

import pytest
from deepspeed.runtime import engine, lr_schedules
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import timer

ZERO = [stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3]


def source(owner, name):
    """The text of a method; decorators that hide it are looked through."""
    text = textwrap.dedent(inspect.getsource(owner))
    body = ast.parse(text).body[0].body
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{owner.__name__}.{name} is gone"
    return ast.get_source_segment(text, found[0])


@pytest.mark.parametrize("optimizer", ZERO)
class TestZero:
    def test_the_loss_scale_is_the_external_one_while_custom_is_set(self, optimizer):
        assert "if self.custom_loss_scaler:\n            return self.external_loss_scale" in source(
            optimizer, "_get_loss_scale"
        ), f"{optimizer.__name__}: corrections ride on external_loss_scale; read normalize._zero again"

    def test_the_step_unscales_by_that_loss_scale_and_reports_the_unscaled_norm(self, optimizer):
        assert "combined_scale = clip * self.loss_scale" in source(optimizer, "unscale_and_clip_grads")
        assert "self._global_grad_norm = scaled_global_grad_norm / " in source(optimizer, "step")

    def test_a_window_can_be_ended_without_a_backward(self, optimizer):
        assert "self.set_gradient_accumulation_boundary(True)" in source(
            optimizer, "finalize_gradient_accumulation_boundary"
        ), f"{optimizer.__name__}: finish() relies on it; read normalize.reduce_accumulated again"


class TestABoundaryWithoutItsBackward:
    """normalize._reduce_what_is_there."""

    def test_deepspeed_itself_reduces_so_at_the_end_of_a_coalesced_block(self):
        flush = source(engine.DeepSpeedEngine, "_flush_coalesced_reduction_zero12")
        for line in (
            "optimizer.reduction_stream.synchronize()",
            "optimizer.setup_buckets()",
            "if optimizer.get_gradient_for_reduction(param) is None:",
            "optimizer.reduce_ready_partitions_and_remove_grads(param, i)",
            "optimizer.overlapping_partition_gradients_reduce_epilogue()",
        ):
            assert line in flush, f"{line!r} is gone from the flush; read it again"

    def test_buckets_are_set_up_and_passes_counted_in_one_place(self):
        assert "self.micro_step_id += 1" in source(stage_1_and_2.DeepSpeedZeroOptimizer, "setup_buckets")

    def test_which_parameters_have_a_gradient_is_told_where_idle_passes_ask(self):
        """normalize.has_every_gradient."""
        asked = source(stage_1_and_2.DeepSpeedZeroOptimizer, "get_gradient_for_reduction")
        assert "return param.grad" in asked
        assert "self.fp32_groups_has_gradients[group_idx][param_idx] = True" in source(
            BF16_Optimizer, "_update_hp_grad"
        )
        assert "has_moe_layers" in source(engine.DeepSpeedEngine, "_configure_distributed_model")

    def test_zero_3_copies_partitions_to_the_host_at_the_boundary_alone(self):
        copied = source(stage3.DeepSpeedZeroOptimizer_Stage3, "partition_grads")
        assert "params_to_release: List[Parameter], grad_partitions: List[Tensor]" in copied
        assert "if self.offload_optimizer:" in copied


def test_the_loss_scale_is_where_deepspeed_logs_it_from():
    logged = source(engine.DeepSpeedEngine, "_get_optimizer_loss_scale")
    assert "self.optimizer.loss_scale_config.cur_scale" in logged
    assert 'getattr(self.optimizer, "cur_scale", None)' in logged


def test_a_growing_loss_scale_is_read_after_it_grew():
    """Why the driver freezes the scale in every fp16 step: DeepSpeed unscales by what the next step will use."""
    step = source(stage_1_and_2.DeepSpeedZeroOptimizer, "step")
    assert step.index("self._update_scale(self.overflow)") < step.index("self.unscale_and_clip_grads(")


def test_a_zero_optimizer_keeps_the_grad_scaler_that_corrections_take_away_for_a_step():
    for optimizer in ZERO:
        assert "if self.torch_autocast_gradscaler:" in inspect.getsource(optimizer._optimizer_step)
        assert "return self.torch_autocast_gradscaler.scale(value)" in inspect.getsource(optimizer.scale_if_loss)


def test_the_engine_counts_a_step_as_skipped_by_an_attribute_of_the_optimizer():
    step = source(engine.DeepSpeedEngine, "_take_model_step")
    assert "self.torch_autocast_z0_gradscaler.step(self.optimizer)" in step
    assert 'if hasattr(self.optimizer, "overflow"):\n            overflow = self.optimizer.overflow' in step


def test_backward_scales_the_loss_of_zero_optimizers_and_of_autocast_on_zero_0_alone():
    """If it scaled fp16 on ZeRO 0 too, normalize.unscaled_loss_scale would scale it twice."""
    backward = source(engine.DeepSpeedEngine, "backward")
    assert backward.count("scale_if_loss(") == backward.count("gradscaler.scale(") == 1
    assert "loss_scale_config" not in backward


class TestLeftOut:
    """engine/internals/leftout.py finishes what DeepSpeed does for the parameters that a pass used."""

    def test_zero_3_records_what_a_window_used_and_adds_to_its_partitions(self):
        optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
        partition = source(optimizer, "partition_grads")
        assert "self._offload_boundary_param_ids.add(param.ds_id)" in partition
        assert "grad_buffer = self.__param_id_to_grad_partition[param.ds_id]" in partition
        assert "self._offload_boundary_param_ids = set()" in source(optimizer, "_pre_step")
        names = ["self", "param", "grad_buffer", "offload_fp32_gradients", "offload_fp32_offsets"]
        assert list(inspect.signature(optimizer._offload_grad_partition_at_boundary).parameters) == names

    def test_zero_1_and_2_finish_an_offloaded_window_parameter_by_parameter(self):
        finish = source(stage_1_and_2.DeepSpeedZeroOptimizer, "_finalize_cpu_offload_gradient_accumulation")
        for line in (
            "not in self._offload_accumulated_param_ids",
            "self.copy_grads_in_partition(param, group_idx)",
            "self._restore_cpu_offload_grad_to_gpu(param)",
            "self.set_norm_for_param_grad_in_gpu(param)",
            "self.update_offload_overflow_tracker_for_param_grad(param)",
            "self.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)",
        ):
            assert line in finish, f"leftout._take_along_zero12 does the same: {line!r} is gone"

    def test_norms_are_forgotten_after_every_step(self):
        for optimizer in ZERO:
            assert "self.norm_for_param_grads = {}" in inspect.getsource(optimizer.reset_cpu_buffers)


class TestDiscarding:
    """normalize.discard_accumulated does what DeepSpeed does on an overflow."""

    def test_zero_1_and_2_clear_gradients_and_the_micro_step(self):
        step = source(stage_1_and_2.DeepSpeedZeroOptimizer, "step")
        for line in (
            "self.micro_step_id = INITIAL_MICRO_STEP_ID",
            "self.zero_grad(set_to_none=True)",
            "self.reset_cpu_buffers()",
            "self.averaged_gradients[k] = None",
            "self.all_grad_tensors[k] = None",
        ):
            assert line in step, f"ZeRO 1/2 clean up otherwise now: {line!r} is gone from step()"

    def test_zero_3_has_its_two_helpers(self):
        optimizer = stage3.DeepSpeedZeroOptimizer_Stage3
        assert "self.micro_step_id = 0" in source(optimizer, "_pre_step")
        step = source(optimizer, "step")
        assert step.index("self._pre_step()") < step.index("self._partition_all_parameters()") < step.index("overflow")
        assert list(inspect.signature(optimizer._overflow_clean_up).parameters) == ["self", "prev_scale"]

    def test_the_bf16_wrapper_has_its_two_helpers(self):
        assert callable(BF16_Optimizer.clear_hp_grads)
        assert callable(BF16_Optimizer.clear_lp_grads)


def test_low_precision_wrappers_move_a_dynamic_scale_by_one_method():
    """normalize._low_precision holds the scale in the step, and calls it afterwards."""
    for optimizer in (FP16_Optimizer, FP16_UnfusedOptimizer):
        update = source(optimizer, "_update_scale")
        assert "if self.loss_scale_config.dynamic_loss_scale:" in update
        assert "self.loss_scale_config.cur_iter += 1" in update


def test_low_precision_wrappers_unscale_by_cur_scale_and_the_unfused_one_keeps_the_raw_norm():
    for optimizer in (FP16_Optimizer, FP16_UnfusedOptimizer):
        assert "combined_scale = self.loss_scale_config.cur_scale" in source(optimizer, "unscale_and_clip_grads")
    assert "self._global_grad_norm = scaled_global_grad_norm / self.loss_scale_config.cur_scale" in source(
        FP16_Optimizer, "step"
    )
    assert "self._global_grad_norm = get_global_norm(norm_list=norm_groups)" in source(FP16_UnfusedOptimizer, "step")


def test_the_bf16_wrapper_takes_its_norm_from_the_buffers_that_are_corrected():
    assert "fp32_groups_gradients_flat" in inspect.getsource(BF16_Optimizer)


def test_fp32_gradients_on_zero_0_are_clipped_by_a_method_that_throws_the_norm_away():
    clip = source(engine.DeepSpeedEngine, "clip_fp32_gradients")
    assert (
        "clip_grad_norm_(parameters=self.module.parameters(), max_norm=self.gradient_clipping(), mpu=self.mpu)" in clip
    ), "normalize.keep_clip_norm repeats this call; read it again"
    assert "return" not in clip


def test_the_step_adds_the_fixed_batch_size_to_global_samples():
    assert "self.global_samples += self.train_batch_size()" in source(engine.DeepSpeedEngine, "_take_model_step")


@pytest.mark.parametrize("name", lr_schedules.VALID_LR_SCHEDULES)
def test_deepspeed_schedulers_take_a_position_and_stand_one_behind(name):
    schedule = getattr(lr_schedules, name)
    assert len(inspect.signature(schedule.step).parameters) == 2
    assert "self.last_batch_iteration = " in inspect.getsource(schedule.step)


class TestCounters:
    """counters.py and monitoring.py put right what DeepSpeed counts by its fixed batch size."""

    def test_the_timer_has_one_batch_size_and_closes_its_step_at_a_boundary(self):
        stop = source(timer.ThroughputTimer, "stop")
        assert "self.batch_size / (self.step_elapsed_time + TIME_EPSILON)" in stop
        assert "if self.start_time > 0:" in stop
        assert stop.index("if global_step:", stop.index("if self.start_time > 0:")) < stop.index(
            "self.step_elapsed_time = 0"
        )
        assert "self.total_elapsed_time += duration" in stop

    def test_the_step_counts_its_calls(self):
        assert "self.micro_steps += 1" in source(engine.DeepSpeedEngine, "step")

    def test_the_monitor_gets_the_lr_and_the_loss_scale_and_no_loss(self):
        """A name that is new here may stand twice in a monitor."""
        text = source(engine.DeepSpeedEngine, "step")
        assert re.findall(r"Train/\w+/\w+", text) == ["Train/Samples/lr", "Train/Samples/loss_scale"]
        assert "Train/Samples/train_loss" not in inspect.getsource(engine)


class TestSequenceParallelism:
    """normalize.averaged_over and engine/internals/groups.py; the figures are measured in tests/distributed/test_sequence.py."""

    def test_zero_0_to_2_divide_by_all_ranks_over_the_sequence_parallel_size(self):
        reduced = source(engine.DeepSpeedEngine, "_reduce_non_expert_gradients")
        assert "dp_world_size = dist.get_world_size(dp_group) / float(self.sequence_parallel_size)" in reduced
        averaged = source(stage_1_and_2.DeepSpeedZeroOptimizer, "average_tensor")
        assert "dist.get_world_size(group=self.dp_process_group) / float(self.sequence_parallel_size)" in averaged

    def test_zero_3_divides_by_all_ranks(self):
        assert "tensor_partition_flat_buffer.div_(world_sz)" in inspect.getsource(coalesced_collectives)

    def test_zero_3_parameters_name_the_group_that_their_gradients_are_summed_over(self):
        group = source(stage3.DeepSpeedZeroOptimizer_Stage3, "_get_param_partition_group")
        assert "ds_process_group" in group

    def test_an_mpu_is_remembered_for_later_engines(self):
        assert "groups.mpu = self.mpu" in source(engine.DeepSpeedEngine, "_configure_distributed_model")

    def test_the_bf16_wrapper_norms_nothing_on_later_ranks_of_a_group_that_stands_for_the_model_parallel_one(self):
        """Why it is refused; if one of these fails it may be right now."""
        assert parallel_state_sp.get_model_parallel_rank is parallel_state_sp.get_sequence_parallel_rank
        assert "tensor_mp_rank = bwc_tensor_model_parallel_rank(mpu=self.mpu)" in source(
            BF16_Optimizer, "get_grads_for_norm"
        )
