"""Rows on precisions and offloading."""

from __future__ import annotations

from ds_parity.parity.matrix.variant import (
    ADAMW,
    BF16,
    FP32_ACCUMULATION,
    NOT_FORESEEN,
    OFFLOADED,
    SHARDED,
    STAGES,
    Variant,
    fp16,
    from_setup,
    zero,
)

_DYNAMIC = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}
_GROWS = dict.fromkeys(STAGES, "fp16_growing_scale")
_UNSCALED = {0: "fp16_zero0_unscaled_loss"}
_AUTOCAST_BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
_AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}

PRECISION = (
    Variant("precision", "fp32", quick=STAGES),
    Variant("precision", "bf16", BF16, quick=(2, 3)),
    Variant("precision", "bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION, refused=(0,), quick=(1,)),
    Variant(
        "precision",
        "bf16, fp32 accumulation, immediate_grad_update",
        {"bf16": {"enabled": True, "immediate_grad_update": True}, **FP32_ACCUMULATION},
        refused=(0,),
    ),
    Variant("precision", "fp16, static loss scale", fp16(loss_scale=128.0), faults=_UNSCALED, quick=(0,)),
    Variant("precision", "fp16, dynamic loss scale", fp16(**_DYNAMIC), faults=_UNSCALED),
    Variant(
        "precision",
        "fp16, dynamic, overflows",
        fp16(**_DYNAMIC | {"initial_scale_power": 22}),
        fields={"windows": 7},
        left_out={"probe": "its window overflows and is skipped", "torch": NOT_FORESEEN},
        faults=_UNSCALED,
    ),
    Variant(
        "precision",
        "fp16, dynamic, scale grows",
        fp16(**_DYNAMIC | {"loss_scale_window": 2}),
        faults=_GROWS,
    ),
    Variant("precision", "torch_autocast bf16", _AUTOCAST_BF16, quick=(2,)),
    Variant(
        "precision",
        "torch_autocast fp16",
        _AUTOCAST_FP16,
        faults=dict.fromkeys(SHARDED, "autocast_fp16_clipping"),
    ),
)

OFFLOAD = (
    Variant("offload", "offload_optimizer, fp32", ADAMW | zero(**OFFLOADED), SHARDED, quick=(2,)),
    Variant("offload", "offload_optimizer, bf16", ADAMW | BF16 | zero(**OFFLOADED), SHARDED),
    Variant("offload", "offload_optimizer, fp16", ADAMW | fp16(loss_scale=128.0) | zero(**OFFLOADED), SHARDED),
    Variant(
        "offload",
        "offload_optimizer, client's SGD",
        {"optimizer": None, "scheduler": None, "zero_force_ds_cpu_optimizer": False, **zero(**OFFLOADED)},
        SHARDED,
        fields=from_setup("client_optimizer"),
    ),
    Variant(
        "offload",
        "offload_optimizer and offload_param, bf16",
        ADAMW | BF16 | zero(**OFFLOADED, offload_param={"device": "cpu"}),
        (3,),
        quick=(3,),
    ),
)
