"""What the launched ranks run: every scenario of the distributed tests, by name."""

from itertools import product

from ds_parity.parity.launch import Call
from ds_parity.parity.scenario import Scenario

STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
WEIGHTS = ("rollout", "token", "pass", "target")
UNIFORM = [*[(gas, "SGD") for gas in (2, 3, 4, 5, 6)], (3, "AdamW")]
TINY = {"model": "ds_parity.parity.model:build_tiny", "max_tokens": 96}


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
    *[(uniform(*at, *how), ("deepspeed", "ds_parity")) for at, how in product(product(STAGES, DTYPES), UNIFORM)],
    *[(ragged(*cell), ("deepspeed-loop", "torch", "ds_parity")) for cell in product(STAGES, DTYPES, WEIGHTS)],
    *[(streams(*cell), ("deepspeed-loop", "torch", "ds_parity")) for cell in product(STAGES, DTYPES)],
    *[(summed(stage), ("deepspeed-loop", "torch", "ds_parity")) for stage in STAGES],
]
CONTROLS = [(ragged(stage, "fp32", weight), "mean-of-micro-batches") for stage, weight in product(STAGES, WEIGHTS[:2])]
PROBES = [
    *[(probed(*cell), "ds_parity.parity.candidate:run") for cell in product(STAGES, DTYPES, WEIGHTS)],
    *[(never_marked(stage), "ds_parity.parity.controls.last_backward_only:run") for stage in STAGES],
]
SAME_WINDOWS = [*product(STAGES, ("fp32",)), (2, "bf16")]


def probe_call(scenario, subject):
    arguments = {"scenario": scenario.to_json(), "subject": subject}
    return Call(f"{scenario.name}: {subject}", "ds_parity.parity.probe:probe", arguments)
