"""Trainers drawn at random: optimizers, groups, schedules, precisions and options of ZeRO, over linear losses.

The gradient of a micro-batch does not depend on the weights, so that plain torch in fp64 judges 16 bits, too.
"""

import random
from dataclasses import dataclass

import deepspeed.runtime.lr_schedules as of_deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import ds_parity

SHAPES = {"a": (3, 7), "b": (5, 4), "c": (1, 1), "d": (16, 9), "e": (2, 3), "f": (11, 13)}
GROUPS = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 2}
SHARES = {"lr": (1, 0.5, 0.25), "eps": (1, 2, 0.5)}
VALUES = {
    "weight_decay": (0.0, 0.1, 0.03),
    "betas": ((0.8, 0.95), (0.5, 0.9), (0.9, 0.99)),
    "momentum": (0.9, 0.5, 0.3),
}


class Matrix(nn.Module):
    """A weight of eighths, which 16 bits have exactly."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-16, 17, shape) / 8.0)

    def forward(self, x):
        return functional.linear(x, self.weight)


class Matrices(nn.Module):
    """Six matrices; the loss of a sample is linear in each."""

    def __init__(self, seed, *, tied, checkpointed, twice):
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleDict({name: Matrix(shape) for name, shape in SHAPES.items()})
        if tied:
            self.again = Matrix(SHAPES["d"])
            self.again.weight = self.parts["d"].weight
        self.tied, self.checkpointed, self.twice = tied, checkpointed, twice

    def forward(self, xs, ys):
        return sum(self._part(name, xs[name], ys[name]) for name in SHAPES)

    def _part(self, name, x, y):
        part = self.parts[name]
        again = self.checkpointed and torch.is_grad_enabled()
        value = checkpoint(_value, part, x, y, use_reentrant=False) if again else _value(part, x, y)
        if name == "d" and self.tied:
            value = 0.5 * value + 0.5 * _value(self.again, x, y)
        if name == "f" and self.twice:
            value = 0.5 * value + 0.5 * _value(part, x, y)
        return value


def _value(part, x, y):
    said = part(x if torch.is_autocast_enabled("cpu") else x.to(part.weight.dtype))
    exact = torch.float64 if said.dtype == torch.float64 else torch.float32
    return (said.to(exact) * y.to(exact)).sum(-1)


def group_of(name):
    """The group of a parameter."""
    return GROUPS["d" if name.startswith("again") else name.split(".")[1]]


class Uncorrected(torch.optim.Optimizer):
    """AdamW without the correction of its first steps, as FusedAdam has it with `bias_correction=False`."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (first, second), rate = group["betas"], group["lr"]
            for one in group["params"]:
                mean = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                square = self.state[one].setdefault("exp_avg_sq", torch.zeros_like(one))
                mean.mul_(first).add_(one.grad, alpha=1 - first)
                square.mul_(second).add_(one.grad**2, alpha=1 - second)
                one.mul_(1 - rate * group["weight_decay"]).sub_(rate * mean / (square.sqrt() + group["eps"]))


ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.02}
FLAT = {"lr": 0.05, "eps": 0.3}
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
# By name: how it is given, its options, and torch's own. Lion is missing: it steps by signs, and DeepSpeed's on the CPU
# has another for exact zeros than torch; beside zero, rounding decides about them.
OPTIMIZERS = {
    "AdamW": ("AdamW", ADAM, ADAMW),
    "Adam": ("Adam", ADAM, ADAMW),
    "Adam of L2": ("Adam", {**ADAM, "adam_w_mode": False}, torch.optim.Adam),
    "torch's AdamW": ("AdamW", {**ADAM, "torch_adam": True}, ADAMW),
    "torch's Adam": ("Adam", {**ADAM, "torch_adam": True, "adam_w_mode": False}, torch.optim.Adam),
    "uncorrected": (FusedAdam, {**ADAM, "bias_correction": False}, Uncorrected),
    "SGD": ("SGD", {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}, SGD),
    "Nesterov's": ("SGD", {"lr": 0.2, "momentum": 0.5, "nesterov": True}, SGD),
    "Adagrad": ("Adagrad", {"lr": 0.05, "eps": 0.1, "weight_decay": 0.01}, torch.optim.Adagrad),
    "RMSprop": ("RMSprop", {"lr": 0.02, "eps": 0.3, "momentum": 0.5}, torch.optim.RMSprop),
    "CPUAdam": (DeepSpeedCPUAdam, ADAM, ADAMW),
    "object": (ADAMW, ADAM, ADAMW),
    "callable": ("callable", ADAM, ADAMW),
    "callable of SGD": ("callable", {"lr": 0.2, "momentum": 0.9}, SGD),
    "RAdam": ("RAdam", FLAT, torch.optim.RAdam),
    "NAdam": (torch.optim.NAdam, FLAT, torch.optim.NAdam),
    "Adadelta": ("Adadelta", {"lr": 1.0, "eps": 0.1}, torch.optim.Adadelta),
    "AMSGrad": (ADAMW, {**ADAM, "amsgrad": True}, ADAMW),
    "foreach": (ADAMW, {**ADAM, "foreach": True}, ADAMW),
    "upwards": (ADAMW, {**ADAM, "maximize": True}, ADAMW),
    "fused": (ADAMW, {**ADAM, "fused": True}, ADAMW),
    "Adamax": ("Adamax", FLAT, torch.optim.Adamax),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 1}, torch.optim.ASGD),
}
DEEPSPEEDS_ALONE = ("adam_w_mode", "torch_adam", "bias_correction")

_BF16, _MOVES = {"enabled": True}, {"enabled": True, "loss_scale": 0}
_INTO_FP32, _AUTOCAST = {"data_types": {"grad_accum_dtype": "fp32"}}, {"enabled": True, "dtype": "bfloat16"}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": _BF16},
    "bf16-fp32": {"bf16": _BF16, **_INTO_FP32},
    "bf16-bf16": {"bf16": _BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16-fp32-at-once": {"bf16": {**_BF16, "immediate_grad_update": True}, **_INTO_FP32},
    "bf16-fp32-later": {"bf16": {**_BF16, "immediate_grad_update": False}, **_INTO_FP32},
    "fp16": {"fp16": {**_MOVES, "initial_scale_power": 7, "loss_scale_window": 3, "hysteresis": 1}},
    "fp16-slowly": {
        "fp16": {
            **_MOVES,
            "initial_scale_power": 8,
            "loss_scale_window": 2,
            "hysteresis": 2,
            "consecutive_hysteresis": True,
        }
    },
    "fp16-cast": {"fp16": {**_MOVES, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 100}},
    "fp16-constant": {"fp16": {"enabled": True, "loss_scale": 64}},
    "fp16-fp32": {"fp16": {"enabled": True, "loss_scale": 128}, **_INTO_FP32},
    "autocast-bf16": {"torch_autocast": _AUTOCAST},
    "autocast-bf16-linear": {"torch_autocast": {**_AUTOCAST, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
    "autocast-fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


def falling(position):
    """A rate's share, behind so many steps, or a part of one."""
    return 1 / (1 + 0.3 * position)


def schedules(rate):
    """By name, DeepSpeed's for the JSON, or what makes torch's."""
    warm = {"warmup_min_lr": rate * 0.2, "warmup_max_lr": rate, "warmup_num_steps": 4, "warmup_type": "linear"}
    steps = {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear"}
    cycle = {"cycle_min_lr": rate * 0.3, "cycle_max_lr": rate, "cycle_first_step_size": 3, "decay_lr_rate": 0.1}
    momenta = {"cycle_min_mom": 0.4, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1}
    ranges = {"lr_range_test_min_lr": rate * 0.3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
    return {
        "WarmupLR": warm,
        "WarmupCosineLR": {**steps, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.3},
        "WarmupDecayLR": {**warm, "total_num_steps": 9, "warmup_num_steps": 3},
        "OneCycle": {**cycle, "decay_step_size": 1, **momenta},
        "LRRangeTest": ranges,
        "falling": lambda optimizer: lr_scheduler.LambdaLR(optimizer, falling),
        "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
        "torch's one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=30),
    }


@dataclass(frozen=True)
class Trainer:
    """What one seed says.

    Attributes:
        seed: of the draw.
        stage: of ZeRO.
        precision: one of PRECISIONS.
        optimizer: one of OPTIMIZERS.
        zero: options of ZeRO.
        more: options of the configuration.
        clip: the greatest norm of a gradient; 0.0: any.
        groups: what differs by group: `lr`, `wd`, `all`, or "" for one group.
        schedule: one of `schedules`, or "" for none.
        by_rollouts: whether it moves by rollouts.
        boundary: `rollouts`, `caller`, or `announced`: said before the last pass by the caller.
        weight: of the loss.
        target: rollouts of a window.
        idles: whether ranks have idle passes.
        infinite: where a pass is not finite: `first`, `mid` or `last` of its window; or in `idle` ones; "" nowhere.
        model: keywords of Matrices.
        acts: what the loop does between windows.
    """

    seed: int
    stage: int
    precision: str
    optimizer: str
    zero: dict
    more: dict
    clip: float
    groups: str
    schedule: str
    by_rollouts: bool
    boundary: str
    weight: str
    target: int
    idles: bool
    infinite: str
    model: dict
    acts: tuple

    @property
    def half(self):
        """Whether the model's weights are in 16 bits."""
        return self.precision.startswith(("bf16", "fp16"))

    @property
    def scaled(self):
        """Whether losses are scaled, and steps skipped that are not finite."""
        return "fp16" in self.precision

    @property
    def options(self):
        """Of the optimizer."""
        return OPTIMIZERS[self.optimizer][1]

    @property
    def turns(self):
        """Whether DeepSpeed deals the parameters out in turn, where its reads of them are wrong."""
        return bool(self.zero.get("round_robin_gradients"))


def in_groups(trainer, model):
    """The groups of a model's parameters."""
    groups = [{"params": []} for _ in range(3 if trainer.groups else 1)]
    for name, one in model.named_parameters():
        groups[group_of(name) if trainer.groups else 0]["params"].append(one)
    differing = {"": (), "lr": ("lr",), "wd": ("weight_decay",), "all": (*SHARES, *VALUES)}[trainer.groups]
    for key in set(differing) & trainer.options.keys():
        for number, group in enumerate(groups):
            group[key] = trainer.options[key] * SHARES[key][number] if key in SHARES else VALUES[key][number]
    return groups


def exact(trainer, model):
    """Torch's optimizer of a model, and a function that makes its scheduler, or None."""
    options = {key: value for key, value in trainer.options.items() if key not in (*DEEPSPEEDS_ALONE, "fused")}
    optimizer = OPTIMIZERS[trainer.optimizer][2](in_groups(trainer, model), **options)
    if not trainer.schedule:
        return optimizer, None
    made = schedules(options["lr"])[trainer.schedule]
    if callable(made):
        return optimizer, made
    return optimizer, lambda optimizer: getattr(of_deepspeed, trainer.schedule)(optimizer, **made)


def built(trainer, seed):
    """An engine of a trainer, its weights drawn by a seed."""
    model = Matrices(seed, **trainer.model)
    kind, options, _ = OPTIMIZERS[trainer.optimizer]
    groups, given, section = in_groups(trainer, model), {}, {"loss_weight": trainer.weight, "exchange_timeout": 15.0}
    config = {**trainer.more, **PRECISIONS[trainer.precision]}
    if kind == "callable":
        given["optimizer"] = lambda them: OPTIMIZERS[trainer.optimizer][2](them, **options)
    elif callable(kind):
        given["optimizer"] = kind(groups, **options)
    else:
        config["optimizer"] = {"type": kind, "params": options}
    if not callable(kind):
        given["model_parameters"] = groups
    if trainer.schedule:
        made = schedules(options["lr"])[trainer.schedule]
        if callable(made):
            given["lr_scheduler"] = made
        else:
            config["scheduler"] = {"type": trainer.schedule, "params": made}
    if trainer.by_rollouts:
        section["lr_progress"] = "rollout"
    if trainer.boundary != "rollouts":
        section["boundary"] = "caller"
    if trainer.by_rollouts or trainer.boundary == "rollouts":
        config["gradient_accumulation_passes"] = trainer.target
    config |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": trainer.clip,
        "zero_optimization": {"stage": trainer.stage, **trainer.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": kind is DeepSpeedCPUAdam and bool(trainer.zero.get("offload_optimizer")),
        "ds_parity": section,
    }
    return ds_parity.initialize(model=model, config=config, **given)[0]


ACTS = (
    "rates",
    "decay",
    "betas",
    "write_weights",
    "write_states",
    "read",
    "load",
    "another_engine",
    "freeze",
    "evaluate",
)


def drawn(seed):
    """Draw a trainer."""
    chance = random.Random(seed)
    pick, often = chance.choice, lambda share: chance.random() < share
    stage, optimizer = pick((0, 1, 1, 2, 2, 3, 3)), pick(tuple(OPTIMIZERS))
    precision = pick(("fp32", "fp32", *PRECISIONS))
    if stage == 0 and precision.startswith(("bf16-fp32", "fp16-fp32")):
        precision = pick(("bf16", "fp16", "bf16-bf16"))  # refused
    if optimizer == "Adagrad" and stage == 0 and precision not in ("fp32", "autocast-bf16"):
        optimizer = "SGD"  # refused, or its first step of zeros changes what it adds up
    schedule = pick(("", "", "", *schedules(1.0)))
    moved = OPTIMIZERS[optimizer][1].keys() & {"betas", "momentum"} or optimizer in ("NAdam", "RAdam", "Adamax")
    if schedule == "torch's one cycle" and not moved:
        schedule = ""  # torch refuses it
    places = ("", "", "first", "mid", "last", "idle") if "fp16" in precision else ("",) * 9 + ("idle",)
    zero = _zero(chance, stage, optimizer)
    if precision == "fp16-fp32" and stage < 3 and "offload_optimizer" in zero:
        places = ("",)  # there, all steps behind one that overflows are skipped
    return Trainer(
        seed=seed,
        stage=stage,
        precision=precision,
        optimizer=optimizer,
        zero=zero,
        more=_more(chance, stage),
        clip=pick((0.0, 0.0, 0.3, 1.5)),
        groups=pick(("", "lr", "wd", "all")),
        schedule=schedule,
        by_rollouts=schedule in ("falling", "WarmupLR", "OneCycle") and often(0.5),
        boundary=pick(("rollouts", "rollouts", "caller", "announced")),
        weight=pick(("rollout", "token")),
        target=chance.randint(3, 9),
        idles=often(0.4),
        infinite=pick(places),
        model={"tied": often(0.25), "checkpointed": often(0.3), "twice": often(0.2)},
        acts=tuple(pick(("", "", "no_rate", "halve", *ACTS)) for _ in range(7)),
    )


def _zero(chance, stage, optimizer):
    zero = {}

    def maybe(key, values, often=0.3):
        if chance.random() < often:
            zero[key] = chance.choice(values)

    if not stage:
        return zero
    for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter"):
        maybe(key, (True, False))
    maybe("reduce_bucket_size", (1, 20, 200))
    maybe("allgather_bucket_size", (8, 200))
    if chance.random() < 0.35:
        part = chance.choice((1.0, 0.4, 0.7)) if stage == 3 and optimizer in ("AdamW", "Adam", "CPUAdam") else 1.0
        zero["offload_optimizer"] = {"device": "cpu", **({"ratio": part} if part < 1 else {})}
    if stage < 3:
        maybe("round_robin_gradients", (True,), 0.2)
        maybe("ignore_unused_parameters", (True,))
        return zero
    maybe("stage3_param_persistence_threshold", (0, 10, 10**6))
    maybe("stage3_max_live_parameters", (0, 80))
    maybe("stage3_prefetch_bucket_size", (0, 10))
    maybe("sub_group_size", (10, 60, 300))
    maybe("zero_hpz_partition_size", (2,), 0.15)
    maybe("stage3_max_reuse_distance", (0,))
    maybe("stage3_gather_16bit_weights_on_model_save", (True,))
    maybe("stage3_use_all_reduce_for_fetch_params", (True,))
    return zero


def _more(chance, stage):
    more = {}
    if chance.random() < 0.2:
        more["communication_data_type"] = chance.choice(("fp32", "bf16", "fp16"))
    if stage < 2 and chance.random() < 0.15:
        more["prescale_gradients"] = True
    if stage < 2 and chance.random() < 0.15:
        more["gradient_predivide_factor"] = chance.choice((2.0, 0.5))
    return more
