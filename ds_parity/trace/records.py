"""The lines of a trace. A float comes back from JSON bit for bit, and every NaN as NaN."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from ds_parity.errors import TraceError
from ds_parity.trace.digits import Precision

SCHEMA = 1

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _number(value: object) -> object:
    """The float that one of JSON's three words for it means; anything else as it is."""
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


# Strict floats refuse every string, and pydantic writes NaN and the infinities as strings.
Float = Annotated[float, BeforeValidator(_number)]
HYPOTHESES = "hypotheses"  # the one field that most lines lack
DIVIDED_BY_TRAINER = "divided-by-trainer"
"""The hypothesis of a step whose loss a trainer has divided itself: what its own division makes of the loss."""
METRIC = "metrics."  # what stands before the name of a metric, where fields are named
Count = Annotated[int, Field(ge=0, lt=2**63)]
FieldName = Literal[
    "passes", "idle_passes", "rollouts", "prompts", "tokens", "total", "loss", "lr", "grad_norm", "loss_scale",
    "skipped", "weights", "metrics",
]  # fmt: skip


class _Line(BaseModel):
    """What all records share: strict, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Start(_Line):
    """The weights that a run starts from, before its first step.

    Attributes:
        norm: the Euclidean norm.
        sketch: as that of `Weights`, so that the distance from here to the weights after a step follows.
        dtype: the type in which the trace tells of weights, here and after every step: `fp32` where the engine keeps
            master weights in fp32, or the type that they are stored in.
    """

    norm: Float
    sketch: tuple[Float, ...]
    dtype: str


class Header(_Line):
    """Line 1: where a trace comes from. What another trainer, or an older release, doesn't tell is None.

    Attributes:
        schema_version: the layout of the trace; this release writes and reads `SCHEMA`.
        scenario: the name of what was run.
        seed: of the run, None where there was none.
        versions: package name to version.
        device: the accelerator, in words.
        ranks: data-parallel ranks (>= 1).
        config_hash: of the configuration.
        engine: what wrote the trace: `ds_parity`, `deepspeed`, `deepspeed-loop`, `torch` or another trainer's name.
        records: the fields of a step that a foreign trainer records; None: the trace is not foreign, and has them all.
        dtype: what the run computes in: `fp32`, `bf16` or `fp16`.
        stage: of ZeRO.
        optimizer: its type by the configuration, such as `AdamW`; None where the run was given one of its own.
        start: the weights before the first step.
    """

    schema_version: int = SCHEMA
    scenario: str | None
    seed: int | None
    versions: dict[str, str] | None
    device: str | None
    ranks: Annotated[int, Field(ge=1)] | None
    config_hash: str | None
    engine: str
    records: tuple[FieldName, ...] | None = None
    dtype: str | None = None
    stage: int | None = None
    optimizer: str | None = None
    start: Start | None = None

    @property
    def foreign(self) -> bool:
        """Whether another trainer wrote the trace, which may not record every field."""
        return self.records is not None


class Weights(_Line):
    """All weights after a step.

    Attributes:
        checksum: SHA-256, 64 lower-case hexadecimal digits.
        norm: the Euclidean norm.
        sketch: sums of weights with fixed pseudo-random signs, the same in every trace. For n of them,
            `|sketch_a - sketch_b| / sqrt(n)` estimates the distance of two weight vectors from their traces alone
            (count sketch, Charikar et al. 2002; traces of older releases have 16 numbers by another rule). Empty: not
            taken.
    """

    checksum: str = Field(pattern=r"^[0-9a-f]{64}$")
    norm: Float
    sketch: tuple[Float, ...] = ()


class Hypothesis(_Line):
    """What a step would have been under a known fault, as a reference has computed it from the same weights.

    Attributes:
        loss: what would be minimised; None where it is the step's own loss.
        grad_norm: before clipping; None where the step has none.
        along: the gradient's part along the step's own gradient, as a multiple of it: their dot product over the square
            of the step's norm; None where that is 0.
        apart: weights after the fault less the weights after the step: the numbers of their sketches, of which number
            i is added to number i modulo 8, to four digits. Empty: not computed.
    """

    loss: Float | None
    grad_norm: Float | None
    along: Float | None
    apart: tuple[Float, ...] = ()


class StepRecord(_Line):
    """One step: what its window contained, and what the optimizer did with it.

    Every field but `step` can be None: a foreign trainer may not record it. ds_parity's own traces hold all counts, the
    total, the LR and `skipped`.

    Attributes:
        step: counted from 1.
        passes: passes of the window, each of which all ranks run together: what one rank runs. What
            `gradient_accumulation_passes` is a number of are micro-batches of all ranks: `micro_batches_on`.
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
        hypotheses: what the step would have been under known faults, by their names (`diagnosis/meanings.py`). Only the
            torch reference of the harness computes them, for small models, and only those that make a difference; an
            engine that divides in a trainer's place says what the trainer's division makes of the loss
            (`DIVIDED_BY_TRAINER`). None: not computed; the line then lacks the key.
    """

    step: int = Field(ge=1, lt=2**63)
    passes: Count | None
    idle_passes: Count | None
    rollouts: Count | None
    prompts: Count | None
    tokens: Count | None
    total: Float | None
    loss: Float | None
    lr: tuple[Float, ...] | None
    grad_norm: Float | None
    loss_scale: Float | None = None
    skipped: bool | None = False
    weights: Weights | None = None
    metrics: dict[str, Float] = Field(default_factory=dict)
    hypotheses: dict[str, Hypothesis] | None = None

    @model_serializer(mode="wrap")
    def _without_none_of_hypotheses(self, others: SerializerFunctionWrapHandler) -> Any:
        fields = others(self)
        if self.hypotheses is None:
            fields.pop(HYPOTHESES, None)  # asked for some fields alone, it is not among them
        return fields

    def micro_batches_on(self, ranks: int) -> int | None:
        """Return the micro-batches of all ranks that entered the window, idle passes not among them.

        The key `gradient_accumulation_passes` is a number of these, and `passes` is not: 64 micro-batches on 2 ranks
        are 32 passes.

        Args:
            ranks: data-parallel ranks (>= 1): `engine.dp_world_size`, in a trace `Header.ranks`.

        Returns:
            `passes` * `ranks` - `idle_passes`; None where the record doesn't hold both.

        Raises:
            TraceError: the step can't have run on so many ranks.
        """
        if self.passes is None or self.idle_passes is None:
            return None
        active = self.passes * ranks - self.idle_passes
        if ranks < 1 or active < 0:
            raise TraceError(
                f"step {self.step}: ranks is {ranks}, with {self.idle_passes} idle passes in {self.passes} passes: "
                "there is at least one rank, and each has at most one idle pass in each pass; give the number of "
                "data-parallel ranks (engine.dp_world_size, in a trace Header.ranks)"
            )
        return active


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory: the header and every step, in the order written; and what reading a foreign one found.

    Attributes:
        precision: field to how it was written, for those that were not written in full.
        mean_loss: a step's loss is the mean over the steps since the one before it in the trace.
        every: the trainer logs one step in so many, where it says so.
        notes: how its columns were read.
    """

    header: Header
    steps: tuple[StepRecord, ...]
    precision: dict[str, Precision] = field(default_factory=dict)
    mean_loss: bool = False
    every: int | None = None
    notes: tuple[str, ...] = ()
