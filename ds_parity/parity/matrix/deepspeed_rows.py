"""Rows on DeepSpeed's communication, models, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_parity.config.features import L2_ON_CPU
from ds_parity.parity.matrix.needed import OPERATORS
from ds_parity.parity.matrix.variant import (
    ADAMW,
    BF16,
    NO_SCHEDULE,
    OFFLOADED,
    SETUPS,
    SHARDED,
    Variant,
    from_setup,
    scheduler,
    section,
    zero,
)

NOT_BARE = "bare DeepSpeed steps by the sum over ranks here, ds_parity by the mean over the window"

COMMUNICATION = (
    Variant("communication", "overlap_comm, fp32", zero(overlap_comm=True), SHARDED, quick=(1,)),
    Variant("communication", "overlap_comm, bf16", BF16 | zero(overlap_comm=True), SHARDED),
    Variant("communication", "overlap_comm: false", BF16 | zero(overlap_comm=False), SHARDED),
    Variant("communication", "contiguous_gradients: false", BF16 | zero(contiguous_gradients=False), SHARDED),
    Variant("communication", "reduce_scatter: false", BF16 | zero(reduce_scatter=False), SHARDED),
    Variant("communication", "round_robin_gradients", BF16 | zero(round_robin_gradients=True), (1, 2)),
    Variant(
        "communication",
        "gradient_allreduce_op: sum",
        {"gradient_allreduce_op": "sum"},
        left_out={"deepspeed": NOT_BARE},
        refused=(3,),
    ),
    Variant("communication", "prescale_gradients", {"prescale_gradients": True} | zero(reduce_scatter=False)),
    Variant(
        "communication",
        "gradient_predivide_factor: 2",
        {"gradient_predivide_factor": 2.0, "prescale_gradients": True} | zero(reduce_scatter=False),
        refused=(3,),
    ),
    Variant(
        "communication",
        "small buckets",
        BF16 | zero(reduce_bucket_size=500, allgather_bucket_size=500),
        SHARDED,
    ),
    Variant(
        "communication",
        "large buckets",
        BF16 | zero(reduce_bucket_size=500_000_000, allgather_bucket_size=500_000_000),
        SHARDED,
    ),
    Variant("communication", "communication_data_type: fp32", BF16 | {"communication_data_type": "fp32"}),
)

STEP = (
    Variant("step", "gradient_clipping: 0", {"gradient_clipping": 0.0}),
    Variant("step", "gradient_clipping: 0, bf16", BF16 | {"gradient_clipping": 0.0}),
    Variant("step", "managed_gradient_accumulation: false", {"managed_gradient_accumulation": False}, quick=(1,)),
)

MODEL = (
    Variant("model", "activation checkpointing", fields={"model": f"{SETUPS}:checkpointed"}),
    Variant("model", "frozen parameters", fields=from_setup("frozen"), quick=(2,)),
    Variant("model", "unused parameters", fields={"model": f"{SETUPS}:with_unused"}),
    Variant("model", "several parameter groups", fields=from_setup("groups")),
    Variant("model", "several parameter groups, bf16", BF16, fields=from_setup("groups")),
)


def _optimizer(kind: str, patch: Mapping[str, Any] | None = None, **parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": parameters}, "scheduler": None, **(patch or {})}


OPTIMIZER = (
    Variant("optimizer", "Adam (fused)", _optimizer("Adam", lr=1e-3)),
    Variant(
        "optimizer",
        "Adam, adam_w_mode: false",
        _optimizer("Adam", lr=1e-3, adam_w_mode=False, weight_decay=0.1),
        calls=(L2_ON_CPU.name,),
    ),
    Variant("optimizer", "AdamW (torch_adam)", ADAMW),
    Variant("optimizer", "Adagrad", _optimizer("Adagrad", lr=1e-2)),
    *(
        Variant(
            "optimizer",
            f"{kind}, offloaded",
            _optimizer(kind, zero(**OFFLOADED), lr=rate),
            SHARDED,
            needs=(OPERATORS[kind],),
        )
        for kind, rate in (("Adagrad", 1e-2), ("Lion", 1e-4))
    ),
    Variant("optimizer", "RMSprop (torch.optim)", _optimizer("RMSprop", lr=1e-4)),
    Variant("optimizer", "client's torch SGD", NO_SCHEDULE, fields=from_setup("client_optimizer"), quick=(2,)),
    Variant("optimizer", "client's callable", NO_SCHEDULE, fields=from_setup("callable_optimizer")),
    Variant(
        "optimizer",
        "client's DeepSpeedCPUAdam",
        NO_SCHEDULE,
        fields=from_setup("client_cpu_adam"),
        left_out={"torch": "its kernel takes no fp64 weights, which the reference has"},
    ),
)
_BY_ROLLOUT = section(lr_progress="rollout")

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
SCHEDULER = (
    *[
        Variant("scheduler", f"{kind}{', by rollout' if patch else ''}", scheduler(kind, **parameters) | patch, (0, 2))
        for kind, parameters in _DEEPSPEED_SCHEDULES.items()
        for patch in ({}, _BY_ROLLOUT)
    ],
    *[
        Variant(
            "scheduler",
            f"client's {kind}{', by rollout' if patch else ''}",
            NO_SCHEDULE | patch,
            (0, 2),
            fields=from_setup(maker),
        )
        for kind, maker in _CLIENTS.items()
        for patch in ({}, _BY_ROLLOUT)
    ],
    Variant("scheduler", "client's callable", {"scheduler": None}, (0, 2), fields=from_setup("callable_scheduler")),
    Variant(
        "scheduler",
        "client's ReduceLROnPlateau, by rollout",
        NO_SCHEDULE | _BY_ROLLOUT,
        (0, 2),
        fields=from_setup("plateau"),
        refused=(0, 2),
    ),
)
