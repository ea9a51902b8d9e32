"""Which adapter knows how an engine's optimizer wrapper keeps its gradients."""

from __future__ import annotations

from typing import Final

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.bf16 import Bf16
from ds_parity.engine.internals.fp16 import LowPrecision, Unfused
from ds_parity.engine.internals.older import supply
from ds_parity.engine.internals.plain import Plain
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.internals.zero3 import Zero3
from ds_parity.engine.internals.zero12 import Zero12
from ds_parity.errors import ConfigError

_ADAPTERS: Final[tuple[tuple[type, type[Adapter]], ...]] = (
    (DeepSpeedZeroOptimizer, Zero12),
    (DeepSpeedZeroOptimizer_Stage3, Zero3),
    (BF16_Optimizer, Bf16),
    (FP16_Optimizer, LowPrecision),
    (FP16_UnfusedOptimizer, Unfused),
    (torch.optim.Optimizer, Plain),
)


def choose(engine: Engine) -> Adapter:
    """Return the adapter of an engine's optimizer wrapper.

    Args:
        engine: the bare DeepSpeed engine.

    Raises:
        ConfigError: nothing here knows how the wrapper keeps its gradients.
    """
    optimizer = engine.optimizer
    for wrapper, adapter in _ADAPTERS:
        # SuperOffload derives from ZeRO 3 and steps before a correction, so a wrapper must be exactly one of these;
        # torch's optimizers may derive as they like.
        if type(optimizer) is wrapper or (wrapper is torch.optim.Optimizer and isinstance(optimizer, wrapper)):
            supply(engine)
            return adapter(engine)
    known = ", ".join(wrapper.__name__ for wrapper, _ in _ADAPTERS)
    raise ConfigError(
        f"optimizer wrapper {type(optimizer).__name__}: ds_parity corrects accumulated gradients under {known} only; "
        "choose a configuration that builds one of these, or drop gradient_accumulation_passes"
    )
