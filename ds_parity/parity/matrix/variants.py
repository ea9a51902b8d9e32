"""The rows of the matrix: what each changes in the base configuration, and on which ZeRO stages it exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES = (0, 1, 2, 3)
SHARDED = (1, 2, 3)

BF16 = {"bf16": {"enabled": True}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
    "scheduler": None,
}
_HERE = "ds_parity.parity.matrix.setups"

NOT_FORESEEN = "which steps overflow depends on fp16 itself, which plain torch in fp64 does not have"
NOT_OF_ONE_WEIGHT = "bare DeepSpeed weighs all passes alike, and each brings its own weight here"
NOT_OF_TERMS = "bare DeepSpeed has one denominator for all terms, and each has its own here"
HIDDEN_BY_ROUNDING = "bf16 rounds the smaller terms' coefficients by up to 0.1; the rows in fp32 show them"
NOT_DIVIDED = "bare DeepSpeed divides by its number of passes, and the caller has divided already"
REDUCED_IN_STEP = "DeepSpeed's buffers live in the step() that reduces, and would hide a copy; see the announced rows"
KEEPS_GRADIENTS = (
    "in a hand-written loop, a window without a step keeps its gradients, and the next window adds to them"
)
NOT_BARE = "bare DeepSpeed steps by the sum over ranks here, ds_parity by the mean over the window"


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        group: the heading that it stands under.
        name: what a reader finds it by.
        patch: merged into the base configuration, section by section; a None removes a key.
        stages: ZeRO stages on which it is run.
        fields: of every scenario of the cell (`Scenario`).
        ragged: of the ragged scenario only.
        passes: the target, with micro-batches of one rollout.
        left_out: check to the reason why it is not made.
        faults: stage to the fault of DeepSpeed (`matrix.faults`), which shows in the comparison with `deepspeed`.
        refused: stages on which ds_parity refuses the configuration.
        quick: stages that belong to the quick subset.
    """

    group: str
    name: str
    patch: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    fields: Mapping[str, Any] = field(default_factory=dict)
    ragged: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 8
    left_out: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    quick: tuple[int, ...] = ()


def _zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


def _fp16(**options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **options}}


def _section(**keys: Any) -> dict[str, Any]:
    return {"ds_parity": keys}


def _from(name: str) -> dict[str, Any]:
    return {"setup": f"{_HERE}:{name}"}


def _scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": parameters}}


_OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
_DYNAMIC = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}
_GROWS = dict.fromkeys(STAGES, "fp16_growing_scale")
_UNSCALED = {0: "fp16_zero0_unscaled_loss"}
_AUTOCAST_BF16 = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
_AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}

_PRECISION = (
    Variant("precision", "fp32", quick=STAGES),
    Variant("precision", "bf16", BF16, quick=(2, 3)),
    Variant("precision", "bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION, refused=(0,), quick=(1,)),
    Variant(
        "precision",
        "bf16, fp32 accumulation, immediate_grad_update",
        {"bf16": {"enabled": True, "immediate_grad_update": True}, **FP32_ACCUMULATION},
        refused=(0,),
    ),
    Variant("precision", "fp16, static loss scale", _fp16(loss_scale=128.0), faults=_UNSCALED, quick=(0,)),
    Variant("precision", "fp16, dynamic loss scale", _fp16(**_DYNAMIC), faults=_UNSCALED),
    Variant(
        "precision",
        "fp16, dynamic, overflows",
        _fp16(**_DYNAMIC | {"initial_scale_power": 22}),
        fields={"windows": 7},
        left_out={"probe": "its window overflows and is skipped", "torch": NOT_FORESEEN},
        faults=_UNSCALED,
    ),
    Variant(
        "precision",
        "fp16, dynamic, scale grows",
        _fp16(**_DYNAMIC | {"loss_scale_window": 2}),
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

_OFFLOAD = (
    Variant("offload", "offload_optimizer, fp32", ADAMW | _zero(**_OFFLOADED), SHARDED, quick=(2,)),
    Variant("offload", "offload_optimizer, bf16", ADAMW | BF16 | _zero(**_OFFLOADED), SHARDED),
    Variant("offload", "offload_optimizer, fp16", ADAMW | _fp16(loss_scale=128.0) | _zero(**_OFFLOADED), SHARDED),
    Variant(
        "offload",
        "offload_optimizer, client's SGD",
        {"optimizer": None, "scheduler": None, "zero_force_ds_cpu_optimizer": False, **_zero(**_OFFLOADED)},
        SHARDED,
        fields=_from("client_optimizer"),
    ),
    Variant(
        "offload",
        "offload_optimizer and offload_param, bf16",
        ADAMW | BF16 | _zero(**_OFFLOADED, offload_param={"device": "cpu"}),
        (3,),
        quick=(3,),
    ),
)

_COMMUNICATION = (
    Variant("communication", "overlap_comm, fp32", _zero(overlap_comm=True), SHARDED, quick=(1,)),
    Variant("communication", "overlap_comm, bf16", BF16 | _zero(overlap_comm=True), SHARDED),
    Variant("communication", "overlap_comm: false", BF16 | _zero(overlap_comm=False), SHARDED),
    Variant("communication", "contiguous_gradients: false", BF16 | _zero(contiguous_gradients=False), SHARDED),
    Variant("communication", "reduce_scatter: false", BF16 | _zero(reduce_scatter=False), SHARDED),
    Variant("communication", "round_robin_gradients", BF16 | _zero(round_robin_gradients=True), (1, 2)),
    Variant(
        "communication",
        "gradient_allreduce_op: sum",
        {"gradient_allreduce_op": "sum"},
        left_out={"deepspeed": NOT_BARE},
        refused=(3,),
    ),
    Variant("communication", "prescale_gradients", {"prescale_gradients": True} | _zero(reduce_scatter=False)),
    Variant(
        "communication",
        "gradient_predivide_factor: 2",
        {"gradient_predivide_factor": 2.0, "prescale_gradients": True} | _zero(reduce_scatter=False),
        refused=(3,),
    ),
    Variant(
        "communication",
        "small buckets",
        BF16 | _zero(reduce_bucket_size=500, allgather_bucket_size=500),
        SHARDED,
    ),
    Variant(
        "communication",
        "large buckets",
        BF16 | _zero(reduce_bucket_size=500_000_000, allgather_bucket_size=500_000_000),
        SHARDED,
    ),
    Variant("communication", "communication_data_type: fp32", BF16 | {"communication_data_type": "fp32"}),
)

_STEP = (
    Variant("step", "gradient_clipping: 0", {"gradient_clipping": 0.0}),
    Variant("step", "gradient_clipping: 0, bf16", BF16 | {"gradient_clipping": 0.0}),
    Variant("step", "managed_gradient_accumulation: false", {"managed_gradient_accumulation": False}, quick=(1,)),
)

_MODEL = (
    Variant("model", "activation checkpointing", fields={"model": f"{_HERE}:checkpointed"}),
    Variant("model", "frozen parameters", fields=_from("frozen"), quick=(2,)),
    Variant("model", "unused parameters", fields={"model": f"{_HERE}:with_unused"}),
    Variant("model", "several parameter groups", fields=_from("groups")),
    Variant("model", "several parameter groups, bf16", BF16, fields=_from("groups")),
)


def _optimizer(kind: str, patch: Mapping[str, Any] | None = None, **parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": parameters}, "scheduler": None, **(patch or {})}


_NO_SCHEDULE = {"optimizer": None, "scheduler": None}
_OPTIMIZER = (
    Variant("optimizer", "Adam (fused)", _optimizer("Adam", lr=1e-3)),
    Variant("optimizer", "Adam, adam_w_mode: false", _optimizer("Adam", lr=1e-3, adam_w_mode=False, weight_decay=0.1)),
    Variant("optimizer", "AdamW (torch_adam)", ADAMW),
    Variant("optimizer", "Adagrad", _optimizer("Adagrad", lr=1e-2)),
    Variant("optimizer", "Adagrad, offloaded", _optimizer("Adagrad", _zero(**_OFFLOADED), lr=1e-2), SHARDED),
    Variant("optimizer", "Lion, offloaded", _optimizer("Lion", _zero(**_OFFLOADED), lr=1e-4), SHARDED),
    Variant("optimizer", "RMSprop (torch.optim)", _optimizer("RMSprop", lr=1e-4)),
    Variant("optimizer", "client's torch SGD", _NO_SCHEDULE, fields=_from("client_optimizer"), quick=(2,)),
    Variant("optimizer", "client's callable", _NO_SCHEDULE, fields=_from("callable_optimizer")),
    Variant(
        "optimizer",
        "client's DeepSpeedCPUAdam",
        _NO_SCHEDULE,
        fields=_from("client_cpu_adam"),
        left_out={"torch": "its kernel takes no fp64 weights, which the reference has"},
    ),
)

_BY_ROLLOUT = _section(lr_progress="rollout")
_DEEPSPEED_SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 3},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.05,
        "cycle_first_step_size": 3,
        "decay_step_size": 2,
        "cycle_momentum": False,
    },
}
_CLIENTS = {
    "LambdaLR": "lambda_lr",
    "CosineAnnealingLR": "cosine_lr",
    "OneCycleLR": "one_cycle_lr",
    "SequentialLR": "sequential_lr",
}
# A schedule is moved by the engine, not by the wrapper of the optimizer: two stages stand for all.
_SCHEDULER = (
    *[
        Variant("scheduler", f"{kind}{', by rollout' if patch else ''}", _scheduler(kind, **parameters) | patch, (0, 2))
        for kind, parameters in _DEEPSPEED_SCHEDULES.items()
        for patch in ({}, _BY_ROLLOUT)
    ],
    *[
        Variant(
            "scheduler",
            f"client's {kind}{', by rollout' if patch else ''}",
            _NO_SCHEDULE | patch,
            (0, 2),
            fields=_from(maker),
        )
        for kind, maker in _CLIENTS.items()
        for patch in ({}, _BY_ROLLOUT)
    ],
    Variant("scheduler", "client's callable", {"scheduler": None}, (0, 2), fields=_from("callable_scheduler")),
    Variant(
        "scheduler",
        "client's ReduceLROnPlateau, by rollout",
        _NO_SCHEDULE | _BY_ROLLOUT,
        (0, 2),
        fields=_from("plateau"),
        refused=(0, 2),
    ),
)

_WINDOW = (
    Variant("window", "one pass", passes=1, ragged={"windows": 8}, left_out={"deepspeed": "2 ranks have 2 rollouts"}),
    Variant("window", "one pass on each rank", passes=2, ragged={"shape": "uniform"}),
    Variant("window", "40 passes on each rank", passes=80, fields={"windows": 2}, ragged={"shape": "uniform"}),
    Variant("window", "corrected by 0.1", passes=20, ragged={"shape": "rising"}, quick=(1,)),
    Variant("window", "corrected by 3 to 8", passes=20, ragged={"shape": "falling"}, quick=(0,)),
    Variant("window", "corrected by 0.1, bf16", BF16, passes=20, ragged={"shape": "rising"}),
    Variant("window", "corrected by 3 to 8, bf16", BF16, passes=20, ragged={"shape": "falling"}),
    Variant("window", "weight: rollout", _section(loss_weight="rollout")),
    Variant("window", "weight: pass", _section(loss_weight="pass")),
    Variant("window", "weight: target", _section(loss_weight="target")),
    Variant(
        "window", "loss_reduction: sum", _section(loss_reduction="sum"), left_out={"deepspeed": "a mean is needed"}
    ),
    Variant("window", "streams with look-ahead", _section(lookahead=12), ragged={"drive": "passes"}, quick=(3,)),
    Variant("window", "ranks that run out of data", ragged={"drive": "passes"}),
)

_WEIGHED = _section(loss_weight="weight")
_ADDED = _section(loss_weight="divided", across_ranks="sum")
_AVERAGED = _section(loss_weight="divided", across_ranks="mean")
_TERMS = {
    "policy": {"weight": "token"},
    "kl": {"weight": "rollout", "coefficient": 0.25},
    "router": {"weight": "pass", "coefficient": -0.5},
    "own": {"weight": "weight", "coefficient": 2.0},
}
_ALIKE = {"policy": {"weight": "token"}, "kl": {"weight": "token", "coefficient": 0.1}}
_NO_BARE = {"deepspeed": NOT_OF_TERMS}
_BY_TOTALS = _section(loss_weight=None, terms=_TERMS)
_LOSSES = (
    Variant("losses", "a weight of the caller's own", _WEIGHED, left_out={"deepspeed": NOT_OF_ONE_WEIGHT}, quick=(1,)),
    Variant("losses", "divided by the caller, added up", _ADDED, (1, 3), left_out={"deepspeed": NOT_DIVIDED}),
    Variant("losses", "divided by the caller, averaged", _AVERAGED, (0, 2), left_out={"deepspeed": NOT_DIVIDED}),
    Variant("losses", "several terms", _BY_TOTALS, left_out=_NO_BARE, quick=(2,)),
    Variant(
        "losses",
        "several terms, bf16",
        BF16 | _BY_TOTALS,
        (2, 3),
        left_out=_NO_BARE | {"probe": HIDDEN_BY_ROUNDING},
    ),
    Variant(
        "losses",
        "several terms, fp16",
        _fp16(loss_scale=128.0) | _BY_TOTALS,
        (1, 2),
        left_out=_NO_BARE,
    ),
    Variant(
        "losses",
        "several terms, totals of streams",
        _section(loss_weight=None, terms=_TERMS, lookahead="window"),
        (1, 3),
        ragged={"drive": "passes"},
        left_out=_NO_BARE,
    ),
    Variant(
        "losses",
        "several terms of one unit",
        _section(loss_weight=None, terms=_ALIKE),
        (0, 2),
        left_out=_NO_BARE,
    ),
)


def _by_caller(**keys: Any) -> dict[str, Any]:
    """The caller ends windows, and no target is given."""
    return {"gradient_accumulation_passes": None, **_section(boundary="caller", **keys)}


_CALLER = (
    Variant("caller's step", "fp32", _by_caller(), quick=(1,)),
    Variant("caller's step", "bf16", BF16 | _by_caller(), quick=(2,)),
    Variant("caller's step", "bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION | _by_caller(), SHARDED),
    Variant(
        "caller's step",
        "fp16, dynamic, overflows",
        _fp16(**_DYNAMIC | {"initial_scale_power": 22}) | _by_caller(),
        fields={"windows": 7},
        left_out={"probe": "its window overflows and is skipped", "torch": NOT_FORESEEN},
        faults=_UNSCALED,
    ),
    Variant("caller's step", "torch_autocast bf16", _AUTOCAST_BF16 | _by_caller(), (0, 2)),
    Variant(
        "caller's step",
        "offload_optimizer, fp32",
        ADAMW | _zero(**_OFFLOADED) | _by_caller(),
        SHARDED,
        left_out={"memory": REDUCED_IN_STEP},
    ),
    Variant(
        "caller's step",
        "overlap_comm, bf16",
        BF16 | _zero(overlap_comm=True) | _by_caller(),
        SHARDED,
        left_out={"memory": REDUCED_IN_STEP},
    ),
    Variant("caller's step", "announced", _by_caller(), ragged={"drive": "announced"}, quick=(0,)),
    Variant(
        "caller's step",
        "announced, overlap_comm, bf16",
        BF16 | _zero(overlap_comm=True) | _by_caller(),
        (1, 2),
        ragged={"drive": "announced"},
    ),
    Variant("caller's step", "streams", _by_caller(), (0, 2), ragged={"drive": "passes"}),
    Variant("caller's step", "streams with look-ahead", _by_caller(lookahead=3), (1, 3), ragged={"drive": "passes"}),
    Variant("caller's step", "unequal backwards", _by_caller(), (0, 1), ragged={"drive": "uneven"}, quick=(1,)),
    Variant("caller's step", "unequal backwards, bf16", BF16 | _by_caller(), (0, 1), ragged={"drive": "uneven"}),
    Variant(
        "caller's step",
        "an empty window",
        _by_caller(),
        ragged={"shape": "hollow"},
        left_out={"memory": KEEPS_GRADIENTS},
    ),
    Variant(
        "caller's step", "a nominal target, LR by rollout", _section(boundary="caller", lr_progress="rollout"), (0, 2)
    ),
    Variant(
        "caller's step",
        "a weight of the caller's own",
        _by_caller(loss_weight="weight"),
        (0, 3),
        left_out={"deepspeed": NOT_OF_ONE_WEIGHT},
    ),
    Variant(
        "caller's step",
        "divided by the caller, added up",
        _by_caller(**_ADDED["ds_parity"]),
        (1, 2),
        left_out={"deepspeed": NOT_DIVIDED},
    ),
    Variant(
        "caller's step",
        "divided by the caller, averaged",
        _by_caller(**_AVERAGED["ds_parity"]),
        (0, 3),
        left_out={"deepspeed": NOT_DIVIDED},
    ),
    Variant(
        "caller's step",
        "several terms",
        _by_caller(loss_weight=None, terms=_TERMS),
        (1, 2),
        left_out=_NO_BARE,
    ),
    Variant(
        "caller's step",
        "several terms, unequal backwards",
        _by_caller(loss_weight=None, terms=_TERMS),
        (0, 1),
        ragged={"drive": "uneven"},
        left_out=_NO_BARE,
    ),
)

_RANKS = (
    Variant("ranks", "1 rank", fields={"ranks": 1}, left_out={"memory": "nothing is exchanged"}),
    Variant("ranks", "4 ranks", fields={"ranks": 4}),
    Variant("ranks", "4 ranks, bf16", BF16, fields={"ranks": 4}),
)

VARIANTS = (
    *_PRECISION,
    *_OFFLOAD,
    *_COMMUNICATION,
    *_STEP,
    *_MODEL,
    *_OPTIMIZER,
    *_SCHEDULER,
    *_WINDOW,
    *_LOSSES,
    *_CALLER,
    *_RANKS,
)
