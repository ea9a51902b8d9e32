"""Rows on windows that the caller ends."""

from __future__ import annotations

from typing import Any

from ds_parity.parity.matrix.precision_rows import _AUTOCAST_BF16, _DYNAMIC, _UNSCALED
from ds_parity.parity.matrix.variant import (
    ADAMW,
    BF16,
    FP32_ACCUMULATION,
    NOT_DIVIDED,
    NOT_FORESEEN,
    NOT_OF_ONE_WEIGHT,
    OFFLOADED,
    SHARDED,
    Variant,
    fp16,
    section,
    zero,
)
from ds_parity.parity.matrix.window_rows import ADDED, AVERAGED, NO_BARE, TERMS

REDUCED_IN_STEP = "DeepSpeed's buffers live in the step() that reduces, and would hide a copy; see the announced rows"
KEEPS_GRADIENTS = (
    "in a hand-written loop, a window without a step keeps its gradients, and the next window adds to them"
)


def _by_caller(**keys: Any) -> dict[str, Any]:
    """The caller ends windows, and no target is given."""
    return {"gradient_accumulation_passes": None, **section(boundary="caller", **keys)}


CALLER = (
    Variant("caller's step", "fp32", _by_caller(), quick=(1,)),
    Variant("caller's step", "bf16", BF16 | _by_caller(), quick=(2,)),
    Variant("caller's step", "bf16, fp32 accumulation", BF16 | FP32_ACCUMULATION | _by_caller(), SHARDED),
    Variant(
        "caller's step",
        "fp16, dynamic, overflows",
        fp16(**_DYNAMIC | {"initial_scale_power": 22}) | _by_caller(),
        fields={"windows": 7},
        left_out={"probe": "its window overflows and is skipped", "torch": NOT_FORESEEN},
        faults=_UNSCALED,
    ),
    Variant("caller's step", "torch_autocast bf16", _AUTOCAST_BF16 | _by_caller(), (0, 2)),
    Variant(
        "caller's step",
        "offload_optimizer, fp32",
        ADAMW | zero(**OFFLOADED) | _by_caller(),
        SHARDED,
        left_out={"memory": REDUCED_IN_STEP},
    ),
    Variant(
        "caller's step",
        "overlap_comm, bf16",
        BF16 | zero(overlap_comm=True) | _by_caller(),
        SHARDED,
        left_out={"memory": REDUCED_IN_STEP},
    ),
    Variant("caller's step", "announced", _by_caller(), ragged={"drive": "announced"}, quick=(0,)),
    Variant(
        "caller's step",
        "announced, overlap_comm, bf16",
        BF16 | zero(overlap_comm=True) | _by_caller(),
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
        "caller's step", "a nominal target, LR by rollout", section(boundary="caller", lr_progress="rollout"), (0, 2)
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
        _by_caller(**ADDED["ds_parity"]),
        (1, 2),
        left_out={"deepspeed": NOT_DIVIDED},
    ),
    Variant(
        "caller's step",
        "divided by the caller, averaged",
        _by_caller(**AVERAGED["ds_parity"]),
        (0, 3),
        left_out={"deepspeed": NOT_DIVIDED},
    ),
    Variant(
        "caller's step",
        "several terms",
        _by_caller(loss_weight=None, terms=TERMS),
        (1, 2),
        left_out=NO_BARE,
    ),
    Variant(
        "caller's step",
        "several terms, unequal backwards",
        _by_caller(loss_weight=None, terms=TERMS),
        (0, 1),
        ragged={"drive": "uneven"},
        left_out=NO_BARE,
    ),
)
