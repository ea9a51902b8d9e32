"""torch's own optimizers: ZeRO 0 in fp32, and under `torch_autocast`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.experts import groups_of_experts, squares_of
from ds_parity.engine.internals.fused_adam import EvenCounts
from ds_parity.engine.internals.model_parts import number_of_parts, parts_of
from ds_parity.engine.internals.surface import Engine, Parameter

_LOG = logging.getLogger("ds_parity")


def _clipped_by_deepspeed(engine: Engine, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Clip the gradients as DeepSpeed does, and return their norm.

    It clips by a coefficient of torch's default dtype, whatever dtype the gradients have (runtime/utils.py,
    clip_grad_norm_, 0.19.8; tools/deepspeed_faults/clipped_in_default_dtype.py). That dtype is the whole process's, so
    where it has fewer digits than fp32 it is left as it is, and DeepSpeed is asked for the norm alone.
    """
    most = engine.gradient_clipping()
    if torch.promote_types(torch.get_default_dtype(), torch.float32) == torch.get_default_dtype():
        normed: torch.Tensor = clip_grad_norm_(parameters=parameters, max_norm=most, mpu=engine.mpu)
        return normed
    norm: torch.Tensor = clip_grad_norm_(parameters=parameters, max_norm=math.inf, mpu=engine.mpu)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


class Plain(Adapter):
    """Gradients lie in `param.grad`."""

    def prepare(self) -> None:
        """Let the engine keep the norm that it computes to clip fp32 gradients, and throws away.

        Without it `get_global_grad_norm()` is None here (tools/deepspeed_faults/clip_norm_lost.py). It costs nothing:
        the same call, its result kept. The call leaves sparse gradients unclipped
        (tools/deepspeed_faults/sparse_gradient_not_clipped.py), so it is given what stands for them. Where experts lie
        on different ranks it takes the mean of the ranks' norms for the norm (expert_norm_zero0.py). A GradScaler takes
        its scale off what the optimizer steps, so that nothing else is clipped where there is one.

        DeepSpeed's Adam begins to count anew where another parameter is the last one with a gradient, and counts a step
        twice where two dtypes are in a group (fused_adam_count.py).
        """
        super().prepare()
        engine = self.engine

        def clip_fp32_gradients() -> None:
            clipped = self._clipped()
            parameters = [_multiplied(one) for one in clipped]
            if self.experts_apart and number_of_parts(engine) == 1:
                norm = self._clip_with_experts(clipped, parameters)
            else:
                norm = _clipped_by_deepspeed(engine, parameters)
            engine._global_grad_norm = norm
            self._skip_unless_finite(norm)

        engine.clip_fp32_gradients = clip_fp32_gradients
        if isinstance(engine.basic_optimizer, FusedAdam):
            EvenCounts(engine.basic_optimizer)

    def groups(self) -> Iterable[Iterable[Parameter]]:
        """Return the parameters of the optimizer's groups as they are now: it steps whatever has a gradient."""
        return [group["params"] for group in self.engine.optimizer.param_groups]

    def complete(self) -> None:
        """Look whether the gradient is finite, where DeepSpeed takes no norm of it to clip.

        ZeRO 1 to 3 skip a step of NaN or inf in every precision (stage_1_and_2.py and stage3.py, step), and ZeRO 0 in
        fp32 makes the weights NaN (tools/deepspeed_faults/nan_gradient_zero0.py). Where ranks have gradients of other
        parameters, by experts or parts of a model, all must skip where one does: a GradScaler asks nobody.
        """
        scaled, apart = self.grad_scaler() is not None, self._parted()
        if not scaled:
            self.engine.optimizer.overflow = False
        # A norm to clip by, and a GradScaler, look at what this rank has, or at the first of those that have the same.
        if not apart and (scaled or self.engine.gradient_clipping()):
            return
        gradients = [p.grad for p in self._trained if p.grad is not None]
        # torch takes no norm of a sparse gradient; its values have the same.
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        # Of no gradient at all torch gives a norm on its default device, whatever that is.
        norm = torch.nn.utils.get_total_norm(dense) if dense else torch.zeros((), device=self.engine.device)
        for group in apart:
            worst = (~norm.isfinite()).float()
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
            norm = torch.where((worst > 0) & norm.isfinite(), torch.inf, norm)
        if not (scaled or self.engine.gradient_clipping()):
            self._skip_unless_finite(norm)
        elif not bool(norm.isfinite()):
            # What looks later looks at this: each rank's scaler, which backs off, or the norm of all.
            first = self._trained[0]
            first.grad = torch.full_like(first, torch.inf)

    def _parted(self) -> list[Any]:
        """Return the process groups over which ranks have gradients of other parameters: of experts, or of parts."""
        if self.experts_apart:
            return [dist.group.WORLD]
        if len(parts_of(self.engine.mpu)) > 1:
            return [bwc_tensor_model_parallel_group(self.engine.mpu)]
        return []

    def _clipped(self) -> list[Parameter]:
        everything = list(self.engine.module.parameters())
        if self.grad_scaler() is None:
            return everything
        stepped = {id(one) for group in self.groups() for one in group}
        return [one for one in everything if id(one) in stepped]

    def _clip_with_experts(self, parameters: list[Parameter], multiplied: list[torch.Tensor]) -> torch.Tensor:
        """Clip by the norm of all experts' gradients, of which a rank has its own, and return that norm."""
        known = groups_of_experts(self.engine.module)
        # What stands for a parameter of an expert is summed over the ranks, too.
        pairs = zip(parameters, multiplied, strict=True)
        groups = {id(other): known[id(one)] for one, other in pairs if id(one) in known}
        squares = squares_of(multiplied, groups)
        norm = torch.stack(squares).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(multiplied, self.engine.gradient_clipping(), norm)
        return norm

    def _skip_unless_finite(self, norm: torch.Tensor) -> None:
        # A GradScaler looks itself.
        if self.grad_scaler() is not None or bool(norm.isfinite()):
            return
        _LOG.warning(
            "the norm of the gradient is %s: no optimizer step is taken, and the LR stays; look for a loss that is "
            "not finite, or beyond the range of fp32",
            float(norm),
        )
        # torch's optimizers leave out what has no gradient, and the engine counts a step as skipped by this name.
        for parameter in self._trained:
            parameter.grad = None
        self.engine.optimizer.overflow = True

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


def _multiplied(parameter: Parameter) -> torch.Tensor:
    """Return the parameter, or a tensor whose `grad` is what DeepSpeed can multiply in its place.

    DeepSpeed multiplies `grad.data` in place by one number, of shape (1,). Of a sparse gradient that is a copy, so
    nothing would be clipped, and torch refuses it of a gradient without dimensions (runtime/utils.py, clip_grad_norm_,
    0.19.8). The values of a coalesced gradient are dense, have its norm, and share its memory; so does a view.
    """
    gradient = parameter.grad
    if gradient is None or (gradient.dim() and not gradient.is_sparse):
        return parameter
    if gradient.is_sparse:
        # Equal rows are added up first: the norm of a sum is not the sum of norms.
        parameter.grad = gradient.coalesce()
        values = parameter.grad.values()
    else:
        values = gradient.view(1)
    stand_in = torch.empty_like(values)
    stand_in.grad = values
    # Tensor parallelism marks its parameters by attributes, which the norm asks for.
    vars(stand_in).update(vars(parameter))
    return stand_in


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
