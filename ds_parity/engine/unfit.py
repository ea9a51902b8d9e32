"""Models that DeepSpeed can't train with a configuration, which it says by a bare error, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.moe.layer import MoE

from ds_parity.config.features import Wanted
from ds_parity.errors import ConfigError


def refuse_unfit(model: Any, config: Mapping[str, Any]) -> None:
    """Raise where a model and the ZeRO stage do not go together.

    Args:
        model: that an engine is to be built over; anything that is no `torch.nn.Module` passes.
        config: of DeepSpeed; where its ZeRO stage is "auto", nothing is refused.

    Raises:
        ConfigError: its parameters are partitioned and the stage is not 3; or it has a MoE layer of DeepSpeed's on
            stage 3.
    """
    stage = Wanted(config).stage
    if stage is None or not isinstance(model, torch.nn.Module):
        return
    if stage < 3:
        _refuse_partitioned(model, stage)
    else:
        _refuse_experts(model)


def _refuse_partitioned(model: torch.nn.Module, stage: int) -> None:
    # Nothing gathers them there, and the forward finds empty tensors ("'weight' must be 2-D").
    born = [name for name, one in model.named_parameters() if hasattr(one, "ds_id")]
    if born:
        raise ConfigError(
            f"zero_optimization.stage = {stage}, and the model was built under deepspeed.zero.Init ({born[0]} is "
            "partitioned): only ZeRO stage 3 gathers such parameters, and the forward of other stages finds none; set "
            "the stage to 3, or build the model outside of zero.Init (transformers' from_pretrained enters it while an "
            "HfDeepSpeedConfig of stage 3 is kept)"
        )


def _refuse_experts(model: torch.nn.Module) -> None:
    # engine.py, _validate_zero3_moe_compatibility (0.19.8): an AssertionError.
    layers = [name for name, one in model.named_modules() if isinstance(one, MoE)]
    if layers:
        raise ConfigError(
            f"zero_optimization.stage = 3, and {layers[0]} is DeepSpeed's own MoE layer: DeepSpeed partitions no "
            "experts that have a group of ranks of their own; use stage 0, 1 or 2, or experts without DeepSpeed's "
            "layer, as a ZeRO-3 leaf module (zero_optimization.leaf_module)"
        )
