"""The gradients of what the stages of a pipeline share, which they add up, wherever the optimizer keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer


def reduce_tied_gradients(engine: Any, stepped: Iterable[Any]) -> None:
    """Let the stages of a tied layer add up the gradients of each weight, wherever the optimizer keeps them.

    DeepSpeed adds up what a stage has, and passes over what it has not (runtime/pipe/engine.py,
    _exec_reduce_tied_grads, 0.19.8). Where stages share several weights, and do not all use each, the gradients of one
    are so added to those of another, or a stage waits (tools/deepspeed_faults/tied_weights_unused.py). What one stage
    alone has is added to zeros here.

    With bf16, fp32 accumulation and CPU offload on ZeRO 1 a gradient is moved from `grad` to `grad_accum` behind each
    backward, and DeepSpeed adds up `grad`, which is None by then: each stage steps the weight by its own part
    (tools/deepspeed_faults/tied_sums_apart.py). Without offload it adds up the sums of its optimizer for bf16. Neither
    optimizer keeps one of a weight that was frozen when the engine was built, which is then an AttributeError.

    Args:
        engine: DeepSpeed's PipelineEngine.
        stepped: the stage's parameters that the optimizer steps.
    """
    optimizer, given = engine.optimizer, engine.module.get_tied_weights_and_groups
    sums: _Sums | _SumsBeside | _SumsOfBf16 = _Sums(stepped)
    if isinstance(optimizer, BF16_Optimizer):
        sums = _SumsOfBf16(optimizer)
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        sums = _SumsBeside(optimizer)

    def that_some_have() -> list[tuple[Any, Any]]:
        pairs = [(weight, group) for weight, group in given() if sums.keeps(weight)]
        if not pairs:
            return []
        own = [sums.of(weight) for weight, _ in pairs]
        found: list[tuple[Any, Any]] = []
        for group in {id(group): group for _, group in pairs}.values():
            here = [(weight, one) for (weight, of_group), one in zip(pairs, own, strict=True) if of_group is group]
            some = torch.tensor([one is not None for _, one in here], dtype=torch.int32, device=engine.device)
            dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)
            for (weight, one), any_has in zip(here, some.tolist(), strict=True):
                if any_has:
                    whole = sums.begin(weight) if one is None else one
                    found.append((SimpleNamespace(grad=whole, _hp_grad=whole), group))
        return found

    engine.module.get_tied_weights_and_groups = that_some_have


class _Sums:
    """The gradients of a window, where torch leaves them."""

    def __init__(self, stepped: Iterable[Any]) -> None:
        self._stepped = {id(one) for one in stepped}

    def keeps(self, weight: Any) -> bool:
        """Whether it is trained."""
        return bool(weight.requires_grad) and id(weight) in self._stepped

    def of(self, weight: Any) -> torch.Tensor | None:
        """The sum of a weight; None where no backward has reached it."""
        found: torch.Tensor | None = weight.grad
        return found

    def begin(self, weight: Any) -> torch.Tensor:
        """Let it be 0, and return it."""
        weight.grad = torch.zeros_like(weight)
        return self.of(weight)  # type: ignore[return-value]


class _SumsBeside:
    """Those that ZeRO 1 keeps beside the weights."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def keeps(self, weight: Any) -> bool:
        """As in `_Sums`."""
        return hasattr(weight, "grad_accum")

    def of(self, weight: Any) -> torch.Tensor | None:
        """As in `_Sums`."""
        found: torch.Tensor | None = self._optimizer.get_gradient_for_reduction(weight)
        return found

    def begin(self, weight: Any) -> torch.Tensor:
        """As in `_Sums`."""
        weight.grad_accum = torch.zeros_like(weight, dtype=self._optimizer.gradient_accumulation_dtype)
        return self.of(weight)  # type: ignore[return-value]


class _SumsOfBf16:
    """Those of DeepSpeed's optimizer for bf16, which notes whether one has a gradient."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        groups = enumerate(optimizer.bf16_groups)
        self._places = {id(one): (at, number) for at, group in groups for number, one in enumerate(group)}

    def keeps(self, weight: Any) -> bool:
        """As in `_Sums`."""
        return id(weight) in self._places

    def of(self, weight: Any) -> torch.Tensor | None:
        """As in `_Sums`."""
        group, number = self._places[id(weight)]
        has: bool = self._optimizer.fp32_groups_has_gradients[group][number]
        return self._optimizer.fp32_groups_gradients[group][number] if has else None

    def begin(self, weight: Any) -> torch.Tensor:
        """As in `_Sums`."""
        group, number = self._places[id(weight)]
        self._optimizer.fp32_groups_has_gradients[group][number] = True
        weight._hp_grad = self._optimizer.fp32_groups_gradients[group][number]
        return self.of(weight)  # type: ignore[return-value]
