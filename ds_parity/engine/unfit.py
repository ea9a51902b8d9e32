"""Models that DeepSpeed can't train with a configuration, which it says by a bare error, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch.nn.parameter import UninitializedParameter

from ds_parity.config.features import Wanted
from ds_parity.errors import ConfigError


def refuse_unfit(model: Any, config: Mapping[str, Any], groups: Iterable[Sequence[torch.Tensor]] = ()) -> None:
    """Raise where a model, or its groups of parameters, and the ZeRO stage do not go together.

    Args:
        model: that an engine is to be built over; anything that is no `torch.nn.Module` passes.
        config: of DeepSpeed; where its ZeRO stage is "auto", nothing is refused.
        groups: the parameters of the optimizer, or of `model_parameters`, group by group.

    Raises:
        ConfigError: its parameters are partitioned and the stage is not 3; it has a MoE layer of DeepSpeed's on stage
            3; a group has frozen parameters alone on stage 1 or 2; or a parameter has no shape yet.
    """
    wanted = Wanted(config)
    stage = wanted.stage
    if stage is None or not isinstance(model, torch.nn.Module):
        return
    _refuse_lazy(model)
    if stage < 3:
        _refuse_partitioned(model, stage)
    else:
        _refuse_experts(model)
    # BF16_Optimizer is another wrapper.
    if stage in (1, 2) and not (stage == 1 and wanted.sums_in_fp32):
        _refuse_frozen(groups, stage)


def _refuse_lazy(model: torch.nn.Module) -> None:
    # DeepSpeed counts elements, and sends them to the other ranks ("Attempted to use an uninitialized parameter").
    lazy = [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"{lazy[0]} has no shape yet (torch.nn.LazyLinear and its like), and DeepSpeed needs all of them to build "
            "an engine: run the model once, on any batch, before initialize()"
        )


def _refuse_frozen(groups: Iterable[Sequence[torch.Tensor]], stage: int) -> None:
    # stage_1_and_2.py, __init__ (0.19.8): an IndexError. What is empty from the start is left out (runtime/engine.py).
    for number, parameters in enumerate(groups):
        if parameters and not any(one.requires_grad for one in parameters):
            raise ConfigError(
                f"zero_optimization.stage = {stage}, and all {len(parameters)} parameters of group {number} are frozen "
                "(requires_grad is False): DeepSpeed partitions what is trained, and builds no engine with a group of "
                "nothing; leave the group out, or freeze its parameters after initialize()"
            )


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
