"""A configuration to start from."""

from __future__ import annotations

from typing import Any

PRECISIONS = ("bf16", "fp32", "fp16")
"""What a model computes in."""

_SCALED = {"initial_scale_power": 12, "loss_scale_window": 1000}


def starting(stage: int = 2, precision: str = "bf16", target: int = 12) -> dict[str, Any]:
    """Return an extended DeepSpeed configuration to start from.

    Args:
        stage: of ZeRO, 0 to 3.
        precision: one of `PRECISIONS`.
        target: rollouts of an optimizer step, on all ranks together (>= 1).
    """
    computed = {} if precision == "fp32" else {precision: {"enabled": True, **(_SCALED if precision == "fp16" else {})}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "ds_parity": {"loss_weight": "token"},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            # Without torch_adam DeepSpeed compiles an Adam of its own on first use, which takes minutes.
            "params": {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 0.001,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
        **computed,
        "zero_optimization": {"stage": stage},
    }
