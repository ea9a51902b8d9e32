"""What engine/normalize.py and engine/schedule.py rely on inside DeepSpeed, as read in 0.19.8.

Each failure here says what changed and what has to be read again before the version is supported.
"""

import ast
import inspect
import textwrap

import deepspeed
import pytest
from deepspeed.runtime import engine, lr_schedules
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2

DEEPSPEED = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
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

    @pytest.mark.skipif(DEEPSPEED < (0, 19, 4), reason="normalize does it by itself before 0.19.4")
    def test_a_window_can_be_ended_without_a_backward(self, optimizer):
        assert "self.set_gradient_accumulation_boundary(True)" in source(
            optimizer, "finalize_gradient_accumulation_boundary"
        ), f"{optimizer.__name__}: finish() relies on it; read normalize.reduce_accumulated again"


class TestABoundaryWithoutItsBackward:
    """normalize._reduce_what_is_there and _pass_of_zeros_3."""

    @pytest.mark.skipif(DEEPSPEED < (0, 19, 2), reason="coalesce_grad_reduction came with 0.19.2")
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
