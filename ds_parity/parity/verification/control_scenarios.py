"""What controls run: a few scenarios that together reveal every fault, made from one configuration of the user's."""

from __future__ import annotations

from typing import Any

from ds_parity.config import parse, refuse_misspelt
from ds_parity.errors import ConfigError
from ds_parity.parity.running.scenario import Scenario

NAMES = (
    "tokens",
    "rollouts",
    "uniform",
    "clipped",
    "unclipped",
    "prompts",
    "progress",
    "hollow",
    "seldom",
    "sharded",
    "caller",
    "weights",
    "averaged",
    "terms",
)

_LR = 0.05
# What differs in the update alone shows in the weights alone, so it must move them far.
_FAR = {"clipped": 5.0, "unclipped": 1.0}
# So high that nothing is clipped: without the key ZeRO 0 takes no norm in fp32, and many a fault shows there first.
_NEVER = 1e9
_KEPT = ("zero_optimization", "bf16", "fp16", "data_types", "torch_autocast", "zero_allow_untested_optimizer")
_OVERSHOOTING: dict[str, Any] = {"shape": "overshoot", "windows": 5, "short": 5}
# What a scenario changes in the section of ds_parity, and in the shape.
_SECTIONS: dict[str, dict[str, Any]] = {
    "rollouts": {"loss_weight": "rollout"},
    "prompts": {"count": "prompt"},
    "progress": {"lr_progress": "rollout"},
    "caller": {"boundary": "caller"},
    "weights": {"loss_weight": "weight"},
    "averaged": {"loss_weight": "divided", "across_ranks": "mean"},
    "terms": {"terms": {"policy": {"weight": "token"}, "kl": {"weight": "rollout", "coefficient": 0.5}}},
}
_SHAPES: dict[str, dict[str, Any]] = {
    "uniform": {"shape": "uniform", "windows": 4, "short": 0},
    "clipped": {"objective": "nll"},
    "unclipped": {"objective": "nll", "max_tokens": 40},
    "prompts": {"shape": "planned", "windows": 3, "short": 0, "micro_batch_tokens": 500},
    "hollow": {"shape": "hollow", "windows": 5, "short": 0},
    "seldom": {"shape": "seldom", "windows": 5, "short": 0},
    "sharded": {"ranks": 1, "sequence_parallel": 2},
}
_SIZE: dict[str, Any] = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 160}


def scenario(name: str, config: dict[str, Any], seed: int = 3) -> Scenario:
    """Return a scenario over what a configuration says of ZeRO and precision.

    SGD, because Adam hides a factor; a rate that moves in every step; overshooting windows, idle ranks, unequal
    micro-batches and an open end, because a fault that only these show must show.

    Args:
        name: one of `NAMES`.
        config: the user's extended configuration.
        seed: of weights, rollouts and raggedness.

    Raises:
        ConfigError: there is no such scenario, or the configuration misspells a key of DeepSpeed's, or has a wrong
            one of ours.
    """
    if name not in NAMES:
        raise ConfigError(f"control scenario {name!r}: it must be one of {', '.join(NAMES)}")
    # A misspelt section is not among the keys that are kept, nor are ours, and would vanish without a word.
    refuse_misspelt(config)
    parse(config)
    section = {**({} if name == "terms" else {"loss_weight": "token"}), **_SECTIONS.get(name, {})}
    shape = {**_OVERSHOOTING, **_SHAPES.get(name, {})}
    kept = {key: config[key] for key in _KEPT if key in config}
    extended = {
        **kept,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 4 if name == "prompts" else 12,
        "gradient_clipping": 0.5 if name == "clipped" else _NEVER,
        **_update(_FAR.get(name, _LR)),
        "zero_allow_untested_optimizer": True,
        "ds_parity": section,
    }
    return Scenario(name, extended, seed=seed, **{**_SIZE, **shape})


def _update(lr: float) -> dict[str, Any]:
    """SGD with momentum, and a rate that moves up to `lr` in ten steps."""
    warmup = {"warmup_num_steps": 10, "warmup_min_lr": lr / 2, "warmup_max_lr": lr, "warmup_type": "linear"}
    return {
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
