"""Programs over the model with linear losses, drawn at random: precisions, ZeRO's options, weights, boundaries.

What a program does is drawn while it runs, by linear_players.py. tests/hard/unforeseen/programs.py draws others, over
models that compute something, in fp32 alone.
"""

import random
from dataclasses import dataclass, field

import deepspeed
import torch

import ds_parity
from tests.hard.unforeseen.linear_model import OUTPUTS, Linear
from tests.hard.unforeseen.programs import falling

RATES = (64.0, 32.0, 16.0)  # by group; a step moves a weight by about 0.1
WARMUP = {"warmup_min_lr": 8.0, "warmup_num_steps": 4, "warmup_type": "linear"}
HALF = ("bf16", "bf16-fp32acc", "bf16-bf16acc", "fp16", "fp16-static")
PRECISIONS = ("fp32", "bf16", *HALF, "autocast-bf16", "autocast-fp16")
WEIGHTS = ("rollout", "token", "pass", "target", "weight", "divided", "terms", "terms")
# How a loop computes a loss. Where ranks meet in forwards or backwards, all take the same way in a pass.
WAYS = (
    *("plain", "plain", "module", "two forwards", "fails first", "fp64", "one element"),
    *("evaluates", "zeroes", "retained"),
)


@dataclass(frozen=True)
class LinearProgram:
    """What a program is configured with.

    Attributes:
        seed: of all that is drawn.
        ranks: that run it.
        stage: of ZeRO.
        precision: one of PRECISIONS.
        zero: DeepSpeed's section `zero_optimization`.
        more: other options of DeepSpeed.
        caller: the caller ends windows.
        target: rollouts, or prompts, of a window; 0 where the caller ends it and none is set.
        overshoot: a key of ds_parity, as are the next six.
        last: `last_window`.
        weight: `loss_weight`, or `terms`.
        terms: unit and coefficient by name.
        summed: `loss_reduction` is `sum`.
        across: `across_ranks`.
        prompts: `count` is `prompt`.
        lookahead: of every passes() that gives none.
        clip: the greatest norm of a gradient, 0.0 for any.
        momentum: of the descent.
        groups: of parameters.
        schedule: "" for none, `warmup` for DeepSpeed's in the JSON, or how torch's is given: `object` or `callable`.
        progress: `ds_parity.lr_progress`.
        maker: the optimizer is given as an `object` or a `callable`.
        door: the engine comes from `initialize`, or `install`; `framework`: and says itself where windows end.
        given: of which type counts are: `int`, `tensor` or `numpy`.
        threaded: each act runs in a thread of its own.
        model: keywords of Linear.
    """

    seed: int
    ranks: int
    stage: int
    precision: str
    zero: dict
    more: dict
    caller: bool
    target: int
    overshoot: str
    last: str
    weight: str
    terms: dict
    summed: bool
    across: str
    prompts: bool
    lookahead: int | str
    clip: float
    momentum: float
    groups: int
    schedule: str
    progress: str
    maker: str
    door: str
    given: str
    threaded: bool
    model: dict = field(default_factory=dict)

    @property
    def overlap(self):
        """Whether ZeRO reduces beside the backward."""
        return bool(self.zero.get("overlap_comm"))

    @property
    def free(self):
        """Whether ranks and passes may use different parameters, in any order."""
        return self.stage == 0 or (self.stage == 1 and not self.overlap)

    @property
    def alike(self):
        """Whether one total corrects all terms, or there are none."""
        units = {unit for unit, _ in self.terms.values()}
        return not units or (len(units) == 1 and not units & {"weight", "target"})

    @property
    def half(self):
        """Whether the weights of the model are in 16 bits, and the optimizer's are not."""
        return self.precision in HALF

    @property
    def readable(self):
        """Whether DeepSpeed reads the optimizer's weights right (tools/deepspeed_faults/round_robin_fp32_param.py)."""
        return self.stage > 0 and not (self.zero.get("round_robin_gradients") and self.stage < 3)


def drawn(seed, ranks):
    """Draw a program."""
    chance = random.Random(seed)
    pick, stage, caller = chance.choice, chance.choice((0, 1, 1, 2, 2, 3, 3)), chance.random() < 0.5
    precision = pick(PRECISIONS)
    if stage == 0 and precision == "bf16-fp32acc":
        precision = "bf16"  # refused
    weight = pick(WEIGHTS)
    nominal = not caller or weight == "target" or chance.random() < 0.5
    target = chance.randint(2, 60 if chance.random() < 0.1 else 14) if nominal else 0
    overshoot, door = pick(("carry", "reset")), pick(("initialize", "initialize", "install", "framework"))
    if caller and door == "framework":
        door = "install"
    if door == "framework" and overshoot == "carry":
        target += -target % ranks
    zero = _zero(chance, stage, ranks)
    schedule = pick(("", "", "", "warmup", "object", "callable"))
    by_torch = schedule in ("object", "callable")
    return LinearProgram(
        seed=seed,
        ranks=ranks,
        stage=stage,
        precision=precision,
        zero=zero,
        more=_more(chance, stage, zero),
        caller=caller,
        target=target,
        overshoot=overshoot,
        last=pick(("step", "step", "drop", "error")),
        weight=weight,
        terms=_terms(chance) if weight == "terms" else {},
        summed=weight in ("rollout", "token") and chance.random() < 0.3,
        across=pick(("sum", "mean")),
        prompts=not caller and chance.random() < 0.2,
        lookahead=pick((0, 1, 2, 3) + (() if caller else ("window", "window"))),
        clip=pick((0.0, 0.0, 0.005)),
        momentum=pick((0.0, 0.0, 0.5)),
        groups=pick((1, 2, 3)),
        schedule=schedule,
        progress=pick(("optimizer_step", "rollout") if target and by_torch else ("optimizer_step",)),
        maker="object" if schedule == "object" else pick(("object", "callable")),
        door=door,
        given=pick(("int", "tensor", "numpy")),
        threaded=chance.random() < 0.15,
        model={
            "tied": chance.random() < 0.25,
            "checkpointed": chance.random() < 0.2,
            "output": pick(OUTPUTS),
            "spare": chance.random() < 0.25,
        },
    )


def _terms(chance):
    unit = chance.choice(("rollout", "token", "pass", "", ""))
    units = [unit or chance.choice(("rollout", "token", "pass", "weight")) for _ in range(chance.choice((2, 3)))]
    return {f"term{number}": (one, chance.choice((1.0, 0.25, -2.0))) for number, one in enumerate(units)}


def _zero(chance, stage, ranks):
    zero, off = {"stage": stage}, {"device": "cpu", "pin_memory": False}
    options = {
        "overlap_comm": (True, False, False),
        "contiguous_gradients": (True, False),
        "reduce_scatter": (True, False),
        "round_robin_gradients": (True, False),
        "reduce_bucket_size": (1, 10, 100, 10**8),
        "allgather_bucket_size": (8, 10**8),
        "use_multi_rank_bucket_allreduce": (True, False),
        "allgather_partitions": (True, False),
    }
    for key, values in options.items() if stage else ():
        if chance.random() < 0.4:
            zero[key] = chance.choice(values)
    if stage and chance.random() < 0.25:
        zero["offload_optimizer"] = off
    options = {
        "stage3_param_persistence_threshold": (0, 6, 10**6),
        "stage3_max_live_parameters": (0, 80, 10**9),
        "stage3_max_reuse_distance": (0, 10**9),
        "stage3_prefetch_bucket_size": (0, 10, 10**7),
        "sub_group_size": (10, 100, 10**9),
        "stage3_use_all_reduce_for_fetch_params": (True, False),
        "stage3_allgather_sequential": (True, False),
        "zero_hpz_partition_size": (1, 2, ranks),
        "stage3_model_persistence_threshold": (0, 50),
    }
    for key, values in options.items() if stage == 3 else ():
        if chance.random() < 0.3:
            zero[key] = chance.choice(values)
    if stage == 3 and chance.random() < 0.2:
        zero["offload_param"] = off
    return zero


def _more(chance, stage, zero):
    whole = stage == 0 or (stage < 3 and zero.get("reduce_scatter") is False)
    options = {
        "communication_data_type": (0.25, ("fp32", "bf16", "fp16")),
        "prescale_gradients": (0.2 if stage < 2 or whole else 0, (True,)),
        "gradient_predivide_factor": (0.2 if whole else 0, (2.0, 0.5)),
        "gradient_allreduce_op": (0.15 if stage < 3 else 0, ("sum",)),
        "wall_clock_breakdown": (0.1, (True,)),
        "managed_gradient_accumulation": (0.1, (True, False)),
        "disable_allgather": (0.1, (True,)),
        "checkpoint": (0.1, ({"tag_validation": "Fail"}, {"use_node_local_storage": True})),
        "comms_logger": (0.05, ({"enabled": True, "verbose": False, "prof_all": True},)),
        "flops_profiler": (0.1, ({"enabled": True, "profile_step": 2, "detailed": False, "output_file": "/dev/null"},)),
    }
    return {key: chance.choice(values) for key, (often, values) in options.items() if chance.random() < often}


def configuration(program):
    """The extended configuration of a program."""
    section = {
        "exchange_timeout": 15.0,
        "last_window": program.last,
        "lookahead": program.lookahead,
        "lr_progress": program.progress,
        "count": "prompt" if program.prompts else "rollout",
        **({"boundary": "caller"} if program.caller else {"overshoot": program.overshoot}),
        **({"across_ranks": program.across} if program.weight == "divided" else {}),
        **({"loss_reduction": "sum"} if program.summed else {}),
    }
    if program.terms:
        section["terms"] = {name: {"weight": one, "coefficient": by} for name, (one, by) in program.terms.items()}
    else:
        section["loss_weight"] = program.weight
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": program.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": program.zero,
        **program.more,
        **_precision(program.precision),
        **({"scheduler": {"type": "WarmupLR", "params": WARMUP}} if program.schedule == "warmup" else {}),
        **({"gradient_accumulation_passes": program.target} if program.target else {}),
        "ds_parity": section,
    }


def _precision(precision):
    kind, _, how = precision.partition("-")
    if kind == "autocast":
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16" if how == "bf16" else "float16"}}
    if kind == "fp16":
        moves = {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
        return {"fp16": {"enabled": True, **({"loss_scale": 16.0} if how else moves)}}
    accumulated = {"data_types": {"grad_accum_dtype": how.removesuffix("acc")}} if how else {}
    return {"bf16": {"enabled": True}, **accumulated} if kind == "bf16" else {}


def modelled(program, seed=None):
    """The model of a program, by default with the weights that it begins with."""
    return Linear(program.seed if seed is None else seed, **program.model)


def built(program, seed=None):
    """An engine of a program."""
    model = modelled(program, seed)
    parameters, number = list(model.parameters()), program.groups
    groups = [
        {"params": parameters[group::number], "lr": RATES[group], "momentum": program.momentum}
        for group in range(number)
    ]
    if program.maker == "object":
        given = {"optimizer": torch.optim.SGD(groups, lr=0.5)}
    else:
        given = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5), "model_parameters": groups}
    if program.schedule == "object":
        given["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(given["optimizer"], falling)
    elif program.schedule == "callable":
        given["lr_scheduler"] = lambda wrapped: torch.optim.lr_scheduler.LambdaLR(wrapped, falling)
    given |= {"model": model, "config": configuration(program)}
    if program.door == "initialize":
        return ds_parity.initialize(**given)[0]
    with ds_parity.install():
        return deepspeed.initialize(**given)[0]
