"""Models and setups that the matrix names: what a user's script builds by itself."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from ds_parity.parity.data.model import TinyDecoder, build_tiny

_RATE = 0.05


class _Checkpointed(nn.Module):
    """A block whose forward runs again in the backward (torch.utils.checkpoint)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.block, *inputs, use_reentrant=False)  # type: ignore[no-any-return]


class _WithUnused(nn.Module):
    """A policy beside a layer that no forward uses."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.used = policy
        self.unused = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Any:
        return self.used(input_ids)


def checkpointed(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with activation checkpointing."""
    model = build_tiny(seed)
    assert isinstance(model, TinyDecoder)
    model.blocks = nn.ModuleList(_Checkpointed(block) for block in model.blocks)
    return model


def with_unused(seed: int = 0) -> nn.Module:
    """Return the tiny decoder beside parameters that get no gradient."""
    torch.manual_seed(seed)
    return _WithUnused(build_tiny(seed))


def frozen(module: nn.Module) -> dict[str, Any]:
    """Freeze the embedding, as LoRA and head tuning freeze more; only what trains is handed over."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("embedding" not in name)
    return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}


def groups(module: nn.Module) -> dict[str, Any]:
    """Two parameter groups: norms without weight decay and at another rate."""
    norms = [p for name, p in module.named_parameters() if "norm" in name]
    others = [p for name, p in module.named_parameters() if "norm" not in name]
    return {"model_parameters": [{"params": others, "weight_decay": 0.01}, {"params": norms, "lr": _RATE / 5}]}


def client_optimizer(module: nn.Module) -> dict[str, Any]:
    """An instance of torch's SGD."""
    return {"optimizer": torch.optim.SGD(module.parameters(), lr=_RATE, momentum=0.9)}


def callable_optimizer(module: nn.Module) -> dict[str, Any]:
    """A function that makes torch's AdamW of the parameters."""
    return {"optimizer": _adamw, "model_parameters": list(module.parameters())}


def client_cpu_adam(module: nn.Module) -> dict[str, Any]:
    """An instance of DeepSpeed's own CPU Adam."""
    return {"optimizer": DeepSpeedCPUAdam(list(module.parameters()), lr=1e-3)}


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def lambda_lr(module: nn.Module) -> dict[str, Any]:
    """A client's LambdaLR: a function of its step, so it can stand at a fraction."""
    return _scheduled(module, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))


def cosine_lr(module: nn.Module) -> dict[str, Any]:
    """A client's CosineAnnealingLR."""
    return _scheduled(module, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10))


def one_cycle_lr(module: nn.Module) -> dict[str, Any]:
    """A client's OneCycleLR, which moves the momentum too and raises when it is stepped past its end."""
    return _scheduled(module, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20))


def sequential_lr(module: nn.Module) -> dict[str, Any]:
    """A client's SequentialLR: warmup, then decay."""
    return _scheduled(module, _sequential)


def plateau(module: nn.Module) -> dict[str, Any]:
    """A client's ReduceLROnPlateau, which moves by a metric."""
    return _scheduled(module, lr_scheduler.ReduceLROnPlateau)


def callable_scheduler(module: nn.Module) -> dict[str, Any]:
    """A function that makes the scheduler, over an optimizer that DeepSpeed makes."""
    return {"model_parameters": list(module.parameters()), "lr_scheduler": _sequential}


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    decay = lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])


def _scheduled(module: nn.Module, make: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=_RATE, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}
