"""Configurations and scenarios that several test modules share; a scenario of one module alone stands there."""

import json
from itertools import product

from ds_parity.config import load_config
from ds_parity.parity.running.scenario import Scenario

STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
WEIGHTS = ("rollout", "token", "pass", "target")
RAGGED_CELLS = [
    *product(STAGES, ("fp32",), WEIGHTS),
    *product(STAGES, ("bf16",), ("token",)),
]
TINY = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 96}


def config(stage, dtype="fp32", passes=12, optimizer="SGD", **section):
    """An extended configuration with clipping on and a schedule that moves from the first step."""
    optimizers = {
        "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "AdamW": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    rate = optimizers[optimizer]["params"]["lr"]
    warmup = {"warmup_num_steps": 10, "warmup_min_lr": rate / 2, "warmup_max_lr": rate, "warmup_type": "linear"}
    extended = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": passes,
        "gradient_clipping": 0.5,
        "optimizer": optimizers[optimizer],
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    return {**extended, "ds_parity": section} if section else extended


def runs_forward(extended):
    """The configuration of an engine that trains nothing."""
    return {key: value for key, value in extended.items() if key not in ("optimizer", "scheduler")}


def uniform(stage, dtype, gas, optimizer="SGD"):
    """Windows that fixed accumulation has too: `gas` passes on each rank, of one rollout each."""
    name = f"uniform-{stage}-{dtype}-{gas}-{optimizer}"
    return Scenario(name, config(stage, dtype, 2 * gas, optimizer), shape="uniform", windows=3, **TINY)


def ragged(stage, dtype, weight):
    """Overshooting windows, idle ranks, losses divided by an estimate, and a last window that stays open."""
    name = f"ragged-{stage}-{dtype}-{weight}"
    extended = config(stage, dtype, loss_weight=weight)
    return Scenario(name, extended, shape="overshoot", windows=4, short=5, seed=3, **TINY)


# What the Hugging Face Trainer puts in place of "auto" (transformers, integrations/deepspeed.py): values that come from
# its arguments and from the model's hidden size.
FILLED_IN = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 12,
    "gradient_accumulation_steps": 6,
    "gradient_clipping": 1.0,
    "enabled": True,
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 1e-3,
    "warmup_num_steps": 4,
    "reduce_bucket_size": 32 * 32,
    "stage3_prefetch_bucket_size": int(0.9 * 32 * 32),
    "stage3_param_persistence_threshold": 10 * 32,
}


def filled_in(path):
    """A ready configuration, its "auto" values filled in."""
    return json.loads(
        json.dumps(load_config(path)),
        object_hook=lambda section: {
            key: FILLED_IN[key] if value == "auto" else value for key, value in section.items()
        },
    )
