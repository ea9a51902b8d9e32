"""Makes DeepSpeed's pipelines right: the norm by which they clip, the buffers they receive in, and how they load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_parity.engine.internals.replaced import replaced


def averaged_over(engine: Any, columns: int) -> int:
    """Return what DeepSpeed divides the sum of all columns' gradients by.

    Args:
        engine: DeepSpeed's PipelineEngine.
        columns: data-parallel ranks (>= 1).
    """
    return columns if engine.gradient_average else 1


def buffers_of_every_type(engine: Any) -> None:
    """Let a pipeline's engine receive each tensor in a buffer of its own.

    With shapes that change, DeepSpeed has one buffer for what it receives from the stage before and behind, whatever
    types these are: three stages that pass on a mask of whole numbers end the process (runtime/pipe/engine.py,
    _allocate_or_extend_buffers, 0.19.8).

    Args:
        engine: DeepSpeed's PipelineEngine.
    """

    def allocate(_: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=engine.device)

    engine._allocate_or_extend_buffers = allocate


def clip_over_stages(engine: Any) -> None:
    """Let a pipeline's engine on ZeRO 0 in fp32 clip by the norm of all stages, and keep that norm.

    DeepSpeed's own leaves out all stages but the first: it asks the grid for its model-parallel rank, which numbers
    stages too, and counts the parameters of rank 0 alone (runtime/utils.py, clip_grad_norm_; runtime/pipe/topology.py,
    get_model_parallel_rank; 0.19.8). A norm that is not finite takes no step, as on ZeRO 1.

    Args:
        engine: DeepSpeed's PipelineEngine, without tensor parallelism.
    """

    def clip_fp32_gradients() -> None:
        # The gradient of tied weights has been summed over their stages, and counts once.
        again = {
            id(parameter)
            for tied in engine.module.tied_comms.values()
            if engine.global_rank != min(tied["ranks"])
            for parameter in tied["module"].parameters()
        }
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        squares = [p.grad.float().pow(2).sum() for p in parameters if id(p) not in again]
        norm = torch.stack([torch.zeros((), device=engine.device), *squares]).sum()
        dist.all_reduce(norm, group=engine.grid.get_pipe_parallel_group())
        norm = norm.sqrt()
        engine._global_grad_norm = norm
        finite = bool(norm.isfinite())
        for parameter in parameters:
            if finite:
                parameter.grad.mul_((engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0))
            else:
                parameter.grad = None
        # The engine counts a step as skipped by this name, which torch's optimizers have not.
        engine.optimizer.overflow = not finite

    engine.clip_fp32_gradients = clip_fp32_gradients


@contextmanager
def as_it_was_saved(engine: Any) -> Iterator[None]:
    """Return a context in which a pipeline's engine loads what its optimizer has saved, and goes on from weights alone.

    On ZeRO 0 in bf16 the optimizer has the weights in fp32, in parts, and saves them in files of their own, as that of
    ZeRO does. DeepSpeed looks for these only with ZeRO (tools/deepspeed_faults/checkpoint_bf16_pipeline.py).

    Args:
        engine: DeepSpeed's PipelineEngine.
    """
    in_parts = not engine.zero_optimization() and isinstance(engine.optimizer, BF16_Optimizer)
    with replaced(engine, "zero_optimization", lambda: True) if in_parts else nullcontext():
        yield
