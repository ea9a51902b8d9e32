"""Engines that the installed release of DeepSpeed builds, and can't step as they were asked to."""

from __future__ import annotations

from typing import Any, Final

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.features import L2_ON_CPU, SUMMED_EXPERTS_ON_CPU
from ds_parity.engine.internals.adagrad import refuse_another
from ds_parity.engine.internals.installed import refused_by_call
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import ConfigError

ONE_DTYPE: Final = 'convert the model to one dtype before initialize() (model.float()), or set "bf16" or "fp16"'
"""The way out where parameters have several dtypes."""


def refuse_unable(engine: Engine) -> None:
    """Raise where the installed release can't step an engine as it was asked to, on this accelerator.

    Args:
        engine: that DeepSpeed has just built.

    Raises:
        ConfigError: its optimizer is DeepSpeed's Adam with a weight decay that is to be a part of the gradient, and is
            decoupled; or it only steps matrices; or its first parameter is narrower than trained ones; or it is an
            Adagrad in whose place DeepSpeed steps another one; or the engine has a MoE layer of DeepSpeed's whose norm
            raises.
    """
    optimizer = engine.basic_optimizer
    refuse_another(engine)
    _refuse_narrow(engine)
    refuse_matrices(optimizer, engine.zero_optimization_stage())
    if isinstance(optimizer, FusedAdam) and not optimizer.adam_w_mode:
        decays = [group["weight_decay"] for group in optimizer.param_groups if group["weight_decay"]]
        if decays and (why := refused_by_call(L2_ON_CPU.name)):
            raise ConfigError(f"adam_w_mode = false with weight_decay = {decays[0]}: {why}")
    summed_in_fp32 = isinstance(engine.optimizer, BF16_Optimizer)
    if summed_in_fp32 and engine.has_moe_layers and (why := refused_by_call(SUMMED_EXPERTS_ON_CPU.name)):
        raise ConfigError(f'data_types.grad_accum_dtype = "fp32" with DeepSpeed\'s own MoE layer: {why}')


def _refuse_narrow(engine: Engine) -> None:
    # stage_1_and_2.py, __init__ (0.19.8): self.dtype is that of param_groups[0]["params"][0], frozen or not. Stage 2
    # reduces gradients in it, in fp16 there is a loss scale, and in bf16 none is looked through for what is not finite.
    wrapper = engine.optimizer
    if not isinstance(wrapper, DeepSpeedZeroOptimizer):
        return
    first = wrapper.dtype
    trained = {one.dtype for group in wrapper.bit16_groups for one in group}
    wider = next((one for one in trained if torch.promote_types(first, one) != first), None)
    if wider is not None:
        said, other = word(first), word(wider)
        raise ConfigError(
            f"zero_optimization.stage = {engine.zero_optimization_stage()}, and the first parameter that the optimizer "
            f"was given, frozen or not, is {said}, while trained ones are {other}: DeepSpeed takes all gradients for "
            f"{said}, so that stage 2 rounds them, and what is not finite may reach the weights; hand over the trained "
            f"parameters alone (model_parameters=[p for p in model.parameters() if p.requires_grad]), {ONE_DTYPE}"
        )


def word(dtype: torch.dtype) -> str:
    """Return how a dtype is told: `bfloat16`."""
    return str(dtype).split(".")[-1]


def refuse_matrices(optimizer: Any, stage: int | None) -> None:
    """Raise where an optimizer that only steps matrices is given vectors by DeepSpeed.

    Args:
        optimizer: any optimizer, a function that makes one (which passes), or None.
        stage: of ZeRO; None: not known yet.

    Raises:
        ConfigError: it is torch's Muon, on ZeRO 1 to 3.
    """
    muon = getattr(torch.optim, "Muon", None)  # since torch 2.9
    if stage and muon is not None and isinstance(optimizer, muon):
        raise ConfigError(
            f"zero_optimization.stage = {stage}, and the optimizer is torch's Muon, which only steps matrices: there "
            "DeepSpeed gives an optimizer flat vectors; choose another one (AdamW, SGD), or use stage 0"
        )
