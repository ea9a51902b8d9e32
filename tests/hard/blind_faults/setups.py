"""What is given to `initialize` beside the model, by the names that a scenario knows."""

from __future__ import annotations

from typing import Any

from torch import nn


def matrices_decayed(module: nn.Module) -> dict[str, Any]:
    """Two groups: matrices with the configuration's weight decay, and norms without any."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    return {"model_parameters": [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]}


def head_apart(module: nn.Module) -> dict[str, Any]:
    """Two groups: the head, and all else."""
    head = [parameter for name, parameter in module.named_parameters() if "head" in name]
    others = [parameter for name, parameter in module.named_parameters() if "head" not in name]
    return {"model_parameters": [{"params": others}, {"params": head}]}


def embedding_frozen(module: nn.Module) -> dict[str, Any]:
    """Every parameter, the embedding without a gradient."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("embedding" not in name)
    return {"model_parameters": [one for one in module.parameters() if one.requires_grad]}


def head_forgotten(module: nn.Module) -> dict[str, Any]:
    """The parameters of all but the head."""
    return {"model_parameters": [one for name, one in module.named_parameters() if "head" not in name]}
