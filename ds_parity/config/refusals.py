"""DeepSpeed options that are wrong, or not verified, with a boundary that moves: each is refused with its reason."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from ds_parity.config.autotp import AUTOTP
from ds_parity.config.faults import ABSENT, Fault
from ds_parity.config.releases import release
from ds_parity.config.settings import AUTO
from ds_parity.values import of_model, switch, whole

_UNSUPPORTED: Final = {
    "compile.deepcompile": (
        "its compiled backward reduces gradients on a schedule of its own, which a moving boundary does not reach",
        "set it to false",
    ),
    "elasticity.enabled": (
        "elastic training picks the batch size by itself, and gradient_accumulation_passes fixes it",
        "remove the section",
    ),
    "autotuning.enabled": (
        "the autotuner replaces the batch size and the ZeRO stage, and gradient_accumulation_passes fixes the batch",
        "tune with plain DeepSpeed first, then remove the section",
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        "it steps parts of the model inside the boundary's backward, before the gradient can be corrected",
        "set it to false",
    ),
    "zero_optimization.elastic_checkpoint": (
        "its checkpoints forget the learning rates (and with torch's own Adam can't be loaded), so a run does not go "
        "on where it was saved; other numbers of ranks they don't load on either",
        "set it to false; universal checkpoints load on any number of ranks",
    ),
    "hybrid_engine.enabled": (
        "its engine has a forward and a step of its own, which are not verified with a moving boundary",
        "set it to false, and generate with a separate inference engine",
    ),
}
_OFFLOADS: Final = ("offload_optimizer", "offload_param")
_COMPRESSED_OPTIMIZERS: Final = ("onebitadam", "zerooneadam", "onebitlamb")
_WEIGHTS_ALONE: Final = release("2.6")  # of torch, whose load() reads nothing else unless it is told to
FP16_NAMES: Final = ("fp16", "float16", "half")
_FP32_NAMES: Final = ("fp32", "float32", "float", "torch.float32")


def names_fp32(dtype: object) -> bool:
    """Return whether a value of `data_types.grad_accum_dtype` is one of DeepSpeed's names for fp32."""
    return str(dtype).lower() in _FP32_NAMES


@dataclass
class _Reader:
    """Reads values by dotted path. "auto" and absent give the default; a wrong type adds a fault and gives it too.

    What DeepSpeed's models take is read as they do ("3" for a stage); in what it takes as it is, a text would be on.
    """

    config: Mapping[str, Any]
    faults: dict[str, Fault] = field(default_factory=dict)

    def raw(self, path: str) -> Any:
        *sections, name = path.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section, AUTO)
            if not isinstance(node, Mapping):
                # DeepSpeed's own default is null.
                if node != AUTO and not (node is None and section in _OFFLOADS):
                    way_out = "leave it out" if node is None else f"write {{...}} for {section}"
                    self.wrong(section, node, "must be an object of keys and values", way_out)
                return ABSENT
        return node.get(name, ABSENT)

    def wrong(self, path: str, value: Any, rule: str, way_out: str) -> None:
        self.faults.setdefault(path, Fault(path, value, rule, way_out))

    def flag(self, path: str) -> bool:
        value = self.raw(path)
        if value in (ABSENT, AUTO):
            return False
        # Beside its models DeepSpeed takes every text for on, "false" too.
        read = None if isinstance(value, str) and not of_model(path) else switch(path, value)
        if read is None:
            self.wrong(path, value, "must be true or false", "write one of the two, without quotes")
        return read is True

    def off(self, path: str) -> bool:
        """Return whether something there is off."""
        return self.raw(path) not in (ABSENT, AUTO, None) and not self.flag(path)

    def number(self, path: str, default: float) -> float:
        value = self.raw(path)
        if value in (ABSENT, AUTO):
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            self.wrong(path, value, "must be a finite number", f"write for example {default:g}, without quotes")
            return default
        return value

    def text(self, path: str) -> str | None:
        value = self.raw(path)
        if value in (ABSENT, AUTO, None):
            return None
        if not isinstance(value, str):
            self.wrong(path, value, "must be a name in quotes", "see DeepSpeed's documentation of this key")
            return None
        return value.lower()

    def stage(self) -> int | None:
        """Return the ZeRO stage; None where it is "auto" or wrong."""
        value = self.raw("zero_optimization.stage")
        if value is ABSENT:
            return None if self.config.get("zero_optimization") == AUTO else 0
        if (stage := whole(value)) is not None and 0 <= stage <= 3:
            return stage
        if value != AUTO:
            self.wrong("zero_optimization.stage", value, "must be 0, 1, 2 or 3", "write the number of the ZeRO stage")
        return None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the greatest float
        return False


def refusals(config: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for every option that is refused, and for every wrong type on the way.

    Args:
        config: an extended or a plain DeepSpeed configuration.
    """
    if isinstance(zero := config.get("zero_optimization"), bool):  # DeepSpeed's old way to write stages 1 and 0
        config = {**config, "zero_optimization": {"stage": int(zero)}}
    reader = _Reader(config)
    stage = reader.stage()
    checks: tuple[Callable[[_Reader, int | None], Iterator[Fault]], ...] = (
        _precision,
        _reduction,
        _step,
        _switches,
        _checkpoint,
    )
    refused = [fault for check in checks for fault in check(reader, stage)]
    # A list comes first: the checks above add to reader.faults while they run.
    return [*reader.faults.values(), *refused]


def _precision(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    # DeepSpeed reads the old name where the new one is missing or null.
    bf16 = "bfloat16" if reader.config.get("bf16") is None else "bf16"
    accumulation = reader.raw("data_types.grad_accum_dtype")
    halves = [name for name in ("fp16", bf16) if reader.flag(f"{name}.enabled")]
    half = next(iter(halves), None)
    if len(halves) > 1:
        rule = f"{halves[1]}.enabled is true, too, and DeepSpeed computes in one of them"
        yield Fault("fp16.enabled", True, rule, "set one of the two to false")
    if half is not None and stage == 0 and names_fp32(accumulation):
        rule = f"DeepSpeed has no {half} with fp32 accumulation at ZeRO stage 0"
        way_out = "set zero_optimization.stage to 1, or leave grad_accum_dtype out"
        yield Fault("data_types.grad_accum_dtype", str(accumulation), rule, way_out)
    autocast = (reader.text("torch_autocast.dtype") or "").removeprefix("torch.")
    in_fp16 = reader.flag("torch_autocast.enabled") and autocast in FP16_NAMES
    if reader.off("zero_optimization.compute_grad_norm") and in_fp16:
        rule = (
            "with torch_autocast in fp16 it leaves overflows to be found by each rank alone, and their loss scales part"
        )
        yield Fault("zero_optimization.compute_grad_norm", False, rule, "leave it out, or autocast to bfloat16")


def _reduction(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    factor = reader.number("gradient_predivide_factor", 1.0)
    if factor != 1 and stage == 3:
        rule = (
            "ZeRO stage 3 refuses it with reduce_scatter, and without that does not multiply by it again where it "
            "equals the number of ranks, so the gradient comes out too small"
        )
        yield Fault("gradient_predivide_factor", factor, rule, "remove it, or use ZeRO stage 1 or 2")
    yield from _before_a_scatter(reader, stage)
    if reader.text("gradient_allreduce_op") == "sum" and stage == 3:
        rule = "ZeRO stage 3 can only average over ranks, and DeepSpeed refuses it"
        yield Fault("gradient_allreduce_op", "sum", rule, 'write "mean": ds_parity undoes the mean')
    shared = reader.raw(AUTOTP)
    if shared not in (ABSENT, AUTO) and ((ranks := whole(shared)) is None or ranks < 0):
        yield Fault(AUTOTP, shared, "must be a whole number from 0", "write how many ranks share a model, 0 for none")
    size = reader.number("sequence_parallel_size", 1)
    if size < 1 or size != int(size):
        yield Fault(
            "sequence_parallel_size", size, "must be a whole number from 1", "write how many ranks share a sequence"
        )


def _before_a_scatter(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    # DeepSpeed refuses these by a bare assertion (stage_1_and_2.py and stage3.py, __init__).
    averages = reader.text("gradient_allreduce_op") != "sum"
    if stage not in (2, 3) or (stage == 2 and not averages):
        return
    if reader.off("zero_optimization.reduce_scatter"):
        return
    rule = f"DeepSpeed does not support it on ZeRO stage {stage} with reduce_scatter, which is on unless it is false"
    way_out = "remove it, or set zero_optimization.reduce_scatter to false"
    factor = reader.number("gradient_predivide_factor", 1.0)
    if factor != 1 and stage == 2:  # stage 3 refuses every one
        yield Fault("gradient_predivide_factor", factor, rule, way_out)
    if reader.flag("prescale_gradients"):
        yield Fault("prescale_gradients", True, rule, way_out)


def _step(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    zenflow = reader.raw("zero_optimization.zenflow")
    if zenflow not in (ABSENT, AUTO, None):
        rule = "ZenFlow updates parameters between boundaries, on an interval of its own"
        yield Fault("zero_optimization.zenflow", zenflow, rule, "remove it")
    optimizer = reader.text("optimizer.type")
    if optimizer in _COMPRESSED_OPTIMIZERS:
        rule = "it sends compressed gradients, and carries their error on a schedule of its own into later steps"
        yield Fault("optimizer.type", reader.raw("optimizer.type"), rule, "use AdamW")
    if optimizer == "muon":
        rule = (
            "ZeRO folds the gradient into Muon's momentum inside the boundary's backward, before a window's total can "
            "correct it, so that momentum mixes gradients of different scales"
        )
        yield Fault("optimizer.type", reader.raw("optimizer.type"), rule, "use AdamW")
    given = reader.raw("optimizer.params")  # what has no keys is refused where it is handed on
    rate = given.get("lr") if isinstance(given, Mapping) else None
    if isinstance(rate, int | float) and rate < 0:
        rule = "a step would go up the gradient, which DeepSpeed's own optimizers take without a word"
        yield Fault("optimizer.params.lr", rate, rule, "give a rate of 0 or more")


def _switches(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    for path, (rule, way_out) in _UNSUPPORTED.items():
        if reader.flag(path):
            yield Fault(path, True, rule, way_out)
    for path in ("managed_gradient_accumulation", "prescale_gradients", "sparse_gradients"):
        reader.flag(path)
    if reader.number("gradient_clipping", 1.0) < 0:
        rule = "must be 0 or greater"
        yield Fault("gradient_clipping", reader.raw("gradient_clipping"), rule, "write 0.0 for no clipping")


def writers_are_not_read() -> bool:
    """Return whether DeepSpeed can't load what its writers save of a ZeRO optimizer: torch reads weights alone."""
    return release(version("torch")) >= _WEIGHTS_ALONE


def _checkpoint(reader: _Reader, stage: int | None) -> Iterator[Fault]:
    # runtime/checkpoint_engine/fast_checkpoint_engine.py and decoupled_checkpoint_engine.py, load();
    # runtime/model_checkpointing/data_parallel_writer_factory.py, _get_data_parallel_config (0.19.8).
    path = "checkpoint.writer"
    if stage is None or (writer := reader.raw(path)) in (ABSENT, AUTO, None):
        return
    if stage > 0 and writers_are_not_read():
        rule = "on ZeRO stages 1 to 3 DeepSpeed can't load what it saves: torch reads weights alone from 2.6 on"
        yield Fault(path, writer, rule, "leave the section out")
    elif stage == 0 and reader.raw(f"{path}.data_parallel") in (ABSENT, AUTO, None):
        rule = "without data_parallel DeepSpeed builds no engine of a model without experts"
        yield Fault(path, writer, rule, 'leave the section out, or write "data_parallel": "replica"')
