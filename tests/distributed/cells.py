"""What the launched ranks run: every scenario of the distributed tests, by name."""

import json
from itertools import product
from pathlib import Path

from ds_parity.config import load_config
from ds_parity.parity.running.launch import Call
from ds_parity.parity.running.scenario import Scenario

STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
WEIGHTS = ("rollout", "token", "pass", "target")
UNIFORM = [*[(gas, "SGD") for gas in (2, 3, 4, 5, 6)], (3, "AdamW")]
# In bf16 fewer: a number of passes or a weight goes wrong in any type or in none.
UNIFORM_CELLS = [
    *[(stage, "fp32", *how) for stage, how in product(STAGES, UNIFORM)],
    *[(stage, "bf16", *how) for stage, how in product(STAGES, [(3, "SGD"), (4, "SGD"), (3, "AdamW")])],
]
RAGGED_CELLS = [
    *product(STAGES, ("fp32",), WEIGHTS),
    *product(STAGES, ("bf16",), ("token",)),
]
TINY = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 96}
REAL_LENGTHS = {"model": "ds_parity.parity.data.model:build_tiny", "max_tokens": 300, "windows": 4, "seed": 5}


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


def uniform(stage, dtype, gas, optimizer="SGD"):
    name = f"uniform-{stage}-{dtype}-{gas}-{optimizer}"
    return Scenario(name, config(stage, dtype, 2 * gas, optimizer), shape="uniform", windows=3, **TINY)


def ragged(stage, dtype, weight):
    """Overshooting windows, idle ranks, losses divided by an estimate, and a last window that stays open."""
    name = f"ragged-{stage}-{dtype}-{weight}"
    extended = config(stage, dtype, loss_weight=weight)
    return Scenario(name, extended, shape="overshoot", windows=4, short=5, seed=3, **TINY)


def streams(stage, dtype):
    """Streams that run dry at different times, counts known ahead, a schedule that stands at nominal progress."""
    section = {"loss_weight": "token", "lookahead": 5, "lr_progress": "rollout"}
    extended = config(stage, dtype, **section)
    return Scenario(f"streams-{stage}-{dtype}", extended, shape="overshoot", drive="passes", windows=4, seed=4, **TINY)


def dry(stage, ranks):
    """Streams that run dry at different times, nothing known ahead: who waits to hear of a pass may be in no forward."""
    extended = config(stage, loss_weight="token")
    return Scenario(
        f"dry-{stage}-{ranks}", extended, ranks, shape="overshoot", drive="passes", windows=4, seed=4, **TINY
    )


def unplanned(stage, target):
    """What `planned` is compared with: the same rollouts, ragged."""
    extended = config(stage, passes=target, loss_weight="token")
    return Scenario(f"unplanned-{stage}-{target}", extended, shape="ragged", **REAL_LENGTHS)


def planned(stage, collation="packed", *, drive="passes", turns=False, target=12, **section):
    """Windows of real lengths, packed or padded, by turns or whole, with look-ahead or without."""
    name = f"planned-{stage}-{collation}-{drive}-{'turns' if turns else 'whole'}-{target}"
    extended = config(stage, passes=target, loss_weight="token", **section)
    how = {"drive": drive, "collation": collation, "turns": turns}
    return Scenario(
        name, extended, shape="planned", micro_batch_tokens=270 if target == 3 else 540, **how, **REAL_LENGTHS
    )


def summed(stage):
    """A loss that is a sum over its tokens, corrected at the boundary."""
    extended = config(stage, loss_weight="token", loss_reduction="sum")
    return Scenario(f"summed-{stage}", extended, shape="overshoot", windows=3, seed=6, **TINY)


def same_windows(stage, dtype, ranks):
    """The same windows on any number of ranks."""
    extended = config(stage, dtype, loss_weight="token")
    return Scenario(f"same-{stage}-{dtype}", extended, ranks, shape="ragged", windows=4, seed=5, **TINY)


def probed(stage, dtype, weight):
    extended = config(stage, dtype, loss_weight=weight)
    return Scenario(f"probe-{stage}-{dtype}-{weight}", extended, shape="overshoot", windows=2, seed=3, **TINY)


def never_marked(stage):
    return Scenario(f"never-marked-{stage}", config(stage, passes=6), shape="uniform", windows=2, seed=3, **TINY)


RUNS = [
    *[(uniform(*cell), ("deepspeed", "ds_parity")) for cell in UNIFORM_CELLS],
    *[(ragged(*cell), ("deepspeed-loop", "torch", "ds_parity")) for cell in RAGGED_CELLS],
    *[(streams(*cell), ("deepspeed-loop", "torch", "ds_parity")) for cell in product(STAGES, DTYPES)],
    *[(summed(stage), ("deepspeed-loop", "torch", "ds_parity")) for stage in STAGES],
]
# A window of 3 leaves a rank idle, now and then in a pass that is not its last.
PLANNED = [
    *[planned(stage, target=3) for stage in STAGES],
    *[planned(stage, turns=True, lookahead=12) for stage in (1, 3)],
    planned(1, "padded", drive="loop"),
    planned(3, "padded", turns=True),
]
RUNS += [(unplanned(stage, 3), ("ds_parity",)) for stage in STAGES]
RUNS += [(unplanned(stage, 12), ("ds_parity",)) for stage in (1, 3)]
RUNS += [(scenario, ("deepspeed-loop", "torch", "ds_parity")) for scenario in PLANNED]
DRY = [(stage, ("deepspeed-loop", "ds_parity")) for stage in STAGES]
CONTROLS = [(ragged(stage, "fp32", weight), "mean-of-micro-batches") for stage, weight in product(STAGES, WEIGHTS[:2])]
PROBES = [
    *[(probed(*cell), "ds_parity.parity.subjects.candidate:run") for cell in RAGGED_CELLS],
    *[
        (never_marked(stage), "ds_parity.parity.subjects.controls.boundary.last_backward_only:LastBackwardOnly.run")
        for stage in STAGES
    ],
]
SAME_WINDOWS = [*product(STAGES, ("fp32",)), (2, "bf16")]


# What the Hugging Face Trainer puts in place of "auto" (transformers, integrations/deepspeed.py), from its arguments and the
# model's hidden size.
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
READY_ENGINES = ("deepspeed-loop", "torch", "ds_parity")
READY = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


def filled_in(path):
    """A ready configuration, its "auto" values filled in."""
    return json.loads(
        json.dumps(load_config(path)),
        object_hook=lambda held: {key: FILLED_IN[key] if value == "auto" else value for key, value in held.items()},
    )


def ready(path):
    """A ready configuration in windows that hold exactly the target, which all of them can take."""
    extended = filled_in(path)
    drive = "passes" if extended.get("ds_parity", {}).get("lookahead") else "loop"
    return Scenario(f"ready-{path.stem}", extended, shape="ragged", drive=drive, windows=3, seed=7, **TINY)


def probe_call(scenario, subject):
    arguments = {"scenario": scenario.to_json(), "subject": subject}
    return Call(f"{scenario.name}: {subject}", "ds_parity.parity.probe.measure:probe_scenario", arguments)
