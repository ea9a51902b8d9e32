"""torch's own optimizers: ZeRO 0 in fp32, and under `torch_autocast`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from deepspeed.runtime.utils import clip_grad_norm_

from ds_parity.engine.internals.base import Adapter


class Plain(Adapter):
    """Gradients lie in `param.grad`."""

    def prepare(self) -> None:
        """Let the engine keep the norm that it computes to clip fp32 gradients, and throws away.

        Without it `get_global_grad_norm()` is None here (tools/deepspeed_faults/clip_norm_lost.py). It costs nothing:
        the same call, its result kept.
        """
        super().prepare()
        engine = self.engine

        def clip_fp32_gradients() -> None:
            engine._global_grad_norm = clip_grad_norm_(
                parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
            )

        engine.clip_fp32_gradients = clip_fp32_gradients

    @contextmanager
    def corrected(self, expected: float, total: float) -> Iterator[None]:
        """Multiply the gradients in place, where there is something to correct."""
        # In place, one sweep: there is no unscale here on which the factor could ride.
        if expected != total:
            for parameter in self.engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(expected / total)
        with nullcontext() if self.grad_scaler() is None else _noting_a_skip(self.engine.optimizer):
            yield


@contextmanager
def _noting_a_skip(optimizer: Any) -> Iterator[None]:
    """Let the engine see that a GradScaler skipped the optimizer: it counts a step as skipped by `optimizer.overflow`.

    torch's optimizers have no such attribute, so DeepSpeed moves the scheduler and counts a step that was none
    (tools/deepspeed_faults/autocast_fp16_zero0_skip.py).
    """

    def stepped(*_: Any) -> None:
        # Fused optimizers are called in any case, and skip by `found_inf`, which they are given for the call.
        optimizer.overflow = bool(getattr(optimizer, "found_inf", False))

    # Assumed skipped until the hook sees the optimizer step.
    optimizer.overflow = True
    handle = optimizer.register_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()
