"""What a row of the matrix changes in the base configuration, and on which ZeRO stages it exists."""

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
SETUPS = "ds_parity.parity.matrix.setups"
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
NO_SCHEDULE = {"optimizer": None, "scheduler": None}
NOT_FORESEEN = "which steps overflow depends on fp16 itself, which plain torch in fp64 does not have"
NOT_OF_ONE_WEIGHT = "bare DeepSpeed weighs all passes alike, and each brings its own weight here"
NOT_DIVIDED = "bare DeepSpeed divides by its number of passes, and the caller has divided already"
NOT_OF_TERMS = "bare DeepSpeed has one denominator for all terms, and each has its own here"


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
        calls: features of releases that its loop asks for by a call, by their names (`config.features`).
        calling: stages on which it does.
        needs: what must be installed beside ds_parity (`matrix.needed`); where it is not, the row is not run.
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
    calls: tuple[str, ...] = ()
    calling: tuple[int, ...] = STAGES
    needs: tuple[str, ...] = ()
    quick: tuple[int, ...] = ()


def zero(**options: Any) -> dict[str, Any]:
    """Return the section of ZeRO."""
    return {"zero_optimization": options}


def fp16(**options: Any) -> dict[str, Any]:
    """Return the section of fp16, enabled."""
    return {"fp16": {"enabled": True, **options}}


def section(**keys: Any) -> dict[str, Any]:
    """Return the section of ds_parity."""
    return {"ds_parity": keys}


def from_setup(name: str) -> dict[str, Any]:
    """Return the field of a scenario whose engine is set up by a function of `matrix.setups`."""
    return {"setup": f"{SETUPS}:{name}"}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return the section of a learning rate schedule."""
    return {"scheduler": {"type": kind, "params": parameters}}
