"""The lines of a trace. A float comes back from JSON bit for bit, and every NaN as NaN."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA = 1

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: object) -> object:
    """The float that one of JSON's three words for it means; anything else as it is."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


# Strict floats refuse every string, and pydantic writes NaN and the infinities as strings.
Float = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Line(BaseModel):
    """What all records share: strict, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Header(_Line):
    """Line 1: where a trace comes from.

    Attributes:
        schema_version: the layout of the trace; this release writes and reads `SCHEMA`.
        scenario: the name of what was run.
        seed: of the run, None where there was none.
        versions: package name to version.
        device: the accelerator, in words.
        ranks: data-parallel ranks (>= 1).
        config_hash: of the configuration.
        engine: what wrote the trace: `ds_parity`, `deepspeed`, `deepspeed-loop`, `torch` or another trainer's name.
    """

    schema_version: int = SCHEMA
    scenario: str
    seed: int | None
    versions: dict[str, str]
    device: str
    ranks: int = Field(ge=1)
    config_hash: str
    engine: str


class Weights(_Line):
    """All weights after a step.

    Attributes:
        checksum: SHA-256, 64 lower-case hexadecimal digits.
        norm: the Euclidean norm.
        sketch: dot products with fixed pseudo-random vectors of +1 and -1, the same in every trace. For n of them,
            `|sketch_a - sketch_b| / sqrt(n)` estimates the distance of two weight vectors from their traces alone
            (Johnson-Lindenstrauss with Rademacher signs, Achlioptas 2003). Empty: not taken.
    """

    checksum: str = Field(pattern=r"^[0-9a-f]{64}$")
    norm: Float
    sketch: tuple[Float, ...] = ()


class StepRecord(_Line):
    """One step: what its window held, and what the optimizer did with it.

    Attributes:
        step: counted from 1.
        passes: passes of the window.
        idle_passes: pairs of (rank, pass) in which the rank had no rollouts.
        rollouts: over all ranks and passes of the window.
        prompts: finished in the window.
        tokens: loss tokens of the window.
        total: the sum of weights, the one denominator of the step.
        loss: weighted and global; None where it wasn't taken.
        lr: one per parameter group, as the step was taken with.
        grad_norm: before clipping; None where it wasn't taken or the step was skipped.
        loss_scale: None without loss scaling.
        skipped: the optimizer took no step (fp16 overflow, empty window).
        weights: after the step; None where they weren't taken.
        metrics: name to weighted mean.
    """

    step: int = Field(ge=1, lt=2**63)
    passes: Count
    idle_passes: Count
    rollouts: Count
    prompts: Count
    tokens: Count
    total: Float
    loss: Float | None
    lr: tuple[Float, ...]
    grad_norm: Float | None
    loss_scale: Float | None = None
    skipped: bool = False
    weights: Weights | None = None
    metrics: dict[str, Float] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory: the header and every step, in the order written."""

    header: Header
    steps: tuple[StepRecord, ...]
