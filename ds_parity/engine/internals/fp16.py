"""FP16_Optimizer and FP16_UnfusedOptimizer: ZeRO 0 in fp16, and in bf16, for which DeepSpeed takes them too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.experts import groups_of_experts, squares_of
from ds_parity.engine.internals.surface import LowPrecisionOptimizer, Parameter


class LowPrecision(Adapter):
    """The step divides gradients by `loss_scale_config.cur_scale`, so that the correction can ride on that division."""

    @property
    def _optimizer(self) -> LowPrecisionOptimizer:
        optimizer: LowPrecisionOptimizer = self.engine.optimizer
        return optimizer

    def prepare(self) -> None:
        """Let masters be made of the parameters themselves, also of those that a loop has given memory of their own.

        One wrapper makes them of a flat buffer (fused_optimizer.py, refresh_fp32_params, 0.19.8), of which parameters
        are views until `parameter.data = tensor`: of weights that were loaded alone the next step would leave nothing.
        """
        super().prepare()
        optimizer = self._optimizer
        refresh = optimizer.refresh_fp32_params

        def refresh_fp32_params() -> None:
            for flat, group in zip(getattr(optimizer, "fp16_groups_flat", []), optimizer.fp16_groups, strict=False):
                flat.copy_(torch.cat([one.detach().flatten() for one in group]))
            refresh()

        optimizer.refresh_fp32_params = refresh_fp32_params  # type: ignore[method-assign]

    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of DeepSpeed's groups."""
        return self._optimizer.fp16_groups

    def unscaled_loss_scale(self) -> float:
        """Return the scale in fp16: `engine.backward` does not multiply by it, and the step divides by it all the same.

        tools/deepspeed_faults/fp16_zero0_unscaled_loss.py shows it.
        """
        config = self._optimizer.loss_scale_config
        return float(config.cur_scale) if config.use_grad_scaling else 1.0

    @contextmanager
    def corrected(self, expected: float, total: float) -> Iterator[None]:
        """Divide by another scale in this step alone."""
        optimizer, config = self._optimizer, self._optimizer.loss_scale_config
        scale, dynamic, iteration = config.cur_scale, config.dynamic_loss_scale, config.cur_iter
        # A dynamic scale stands still during the step, and moves after it by what the step came to: DeepSpeed would
        # divide by the scale of the next step (tools/deepspeed_faults/fp16_growing_scale.py).
        config.cur_scale, config.dynamic_loss_scale = scale * total / expected, False
        try:
            yield
        finally:
            config.cur_scale, config.dynamic_loss_scale = scale, dynamic
        if dynamic:
            # The step has counted itself already, and _update_scale counts it.
            config.cur_iter = iteration
            optimizer._update_scale(optimizer.overflow)

    def refresh(self) -> None:
        """Copy the model's weights to those in fp32, from which the next step would take the old ones.

        tools/deepspeed_faults/weights_alone_zero0.py shows it.
        """
        self._optimizer.refresh_fp32_params()

    def show_stepped_weights(self) -> None:
        """Copy the weights in fp32 to the model's, as a step does.

        One wrapper keeps them in a row, the other one by one.
        """
        for group, stepped in zip(self._optimizer.fp16_groups, self.engine.optimizer.param_groups, strict=True):
            row, begin = torch.cat([one.data.flatten() for one in stepped["params"]]), 0
            for one in group:
                one.data.copy_(row[begin : begin + one.numel()].view(one.shape))
                begin += one.numel()

    def _fp16_scale(self) -> float | None:
        return self._optimizer.loss_scale_config.cur_scale


class Unfused(LowPrecision):
    """FP16_UnfusedOptimizer keeps the norm of the gradients as they came in, before they are unscaled."""

    def prepare(self) -> None:
        """Clip by a norm with the experts in it, which DeepSpeed splits off and then leaves out.

        runtime/fp16/unfused_optimizer.py, step and step_fused_lamb, 0.19.8; tools/deepspeed_faults/
        expert_norm_unfused.py shows it.
        """
        super().prepare()
        groups = groups_of_experts(self.engine.module)
        if not groups:
            return
        optimizer = self._optimizer
        clip = optimizer.unscale_and_clip_grads

        def clip_with_experts(total_norm: float, apply_scale: bool = True) -> float:
            experts = (one for group in optimizer.fp16_groups for one in group if id(one) in groups)
            norm = math.sqrt(float(total_norm) ** 2 + sum(map(float, squares_of(experts, groups))))
            optimizer._global_grad_norm = norm
            return clip(norm, apply_scale)

        optimizer.unscale_and_clip_grads = clip_with_experts  # type: ignore[method-assign]

    @contextmanager
    def corrected(self, expected: float, total: float) -> Iterator[None]:
        """Divide by another scale in this step alone, and put the norm right."""
        scale = self._optimizer.loss_scale_config.cur_scale
        with super().corrected(expected, total):
            yield
        if self.engine.was_step_applied():
            norm = self.engine._global_grad_norm * (expected / total / scale)
            self._optimizer._global_grad_norm = self.engine._global_grad_norm = norm
