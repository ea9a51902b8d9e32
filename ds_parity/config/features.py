"""What a DeepSpeed configuration asks for, as far as releases of DeepSpeed differ in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ds_parity.config.autotp import AUTOTP as SIZE_OF_AUTOTP
from ds_parity.config.autotp import autotp_size
from ds_parity.config.faults import ABSENT
from ds_parity.config.refusals import FP16_NAMES, names_fp32
from ds_parity.config.settings import AUTO, SECTION
from ds_parity.values import switch, whole


@dataclass(frozen=True, slots=True)
class Wanted:
    """A configuration, extended or plain, as its features are asked for. What is "auto" asks for nothing yet."""

    config: Mapping[str, Any]

    def value(self, path: str) -> Any:
        """Return what stands at a dotted path; ABSENT where nothing does, or "auto"."""
        node: Any = self.config
        for name in path.split("."):
            node = node.get(name, ABSENT) if isinstance(node, Mapping) else ABSENT
        return ABSENT if node == AUTO else node

    def on(self, path: str) -> bool:
        """Return whether DeepSpeed takes what stands at a dotted path for on."""
        return (value := self.value(path)) is not ABSENT and switch(path, value) is True

    def off(self, path: str) -> bool:
        """Return whether something stands at a dotted path that DeepSpeed takes for off."""
        return (value := self.value(path)) is not ABSENT and switch(path, value) is False

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, None where it is filled in later."""
        section = self.config.get("zero_optimization", {})
        if isinstance(section, bool):  # DeepSpeed's old way to write stages 1 and 0
            return int(section)
        if section == AUTO or (isinstance(section, Mapping) and section.get("stage") == AUTO):
            return None
        return whole(self.value("zero_optimization.stage")) or 0

    @property
    def half(self) -> str | None:
        """`bf16` or `fp16`, of DeepSpeed's own sections; None where neither is on, or not yet."""
        return next((name for name, key in self._halves if self.on(f"{key}.enabled")), None)

    @property
    def precision(self) -> str:
        """`fp32`, `bf16` or `fp16`, of DeepSpeed's own sections; `auto` where they are filled in later."""
        sections = (self.config.get(key) for _, key in self._halves)
        later = any(isinstance(section, Mapping) and section.get("enabled") == AUTO for section in sections)
        return self.half or (AUTO if later else "fp32")

    @property
    def bf16_section(self) -> str:
        """The name of the section of bf16: DeepSpeed reads the old one where the new one is missing or null."""
        return "bfloat16" if self.config.get("bf16") is None else "bf16"

    @property
    def _halves(self) -> tuple[tuple[str, str], ...]:
        return ("bf16", self.bf16_section), ("fp16", "fp16")

    @property
    def autocast(self) -> str:
        """What `torch_autocast` computes in: `bf16`, `fp16`, or "" where it is off."""
        if not self.on("torch_autocast.enabled"):
            return ""
        return "fp16" if str(self.value("torch_autocast.dtype")).removeprefix("torch.") in FP16_NAMES else "bf16"

    @property
    def offloads(self) -> bool:
        """Whether optimizer states lie on the CPU or on a disk."""
        device = self.value("zero_optimization.offload_optimizer.device")
        return device in ("cpu", "nvme") or self.on("zero_optimization.cpu_offload")

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients of bf16 are accumulated in fp32."""
        return self.precision == "bf16" and names_fp32(self.value("data_types.grad_accum_dtype"))

    @property
    def callers(self) -> bool:
        """Whether the caller ends windows."""
        return str(self.value(f"{SECTION}.boundary")) == "caller"

    @property
    def plain(self) -> bool:
        """Whether nothing but stage and precision is asked for of what is a feature here."""
        return not (self.offloads or self.sums_in_fp32 or self.autocast)


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that may be right, corrected or refused on a release of DeepSpeed.

    Attributes:
        name: unique, for people.
        met: whether a configuration asks for it; of those that a call or a model asks for, no configuration does.
        key: the key by which a configuration asks for it, which a refusal shows with its value.
        accelerator: DeepSpeed's name of the one on which alone releases differ; "": on all.
        other_key: another spelling of the key; "" where there is none.
    """

    name: str
    met: Callable[[Wanted], bool]
    key: str = "zero_optimization.stage"
    accelerator: str = ""
    other_key: str = ""

    def asked_for(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration asks for it."""
        return self.met(Wanted(config))

    def shown_in(self, config: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the key by which a configuration asks for it, and its value there."""
        asked = Wanted(config)
        key = self.other_key if self.other_key and asked.value(self.key) is ABSENT else self.key
        return key, asked.value(key)


def _never(_: Wanted) -> bool:
    return False


def _plain(stage: int, precision: str) -> Feature:
    def met(asked: Wanted) -> bool:
        return asked.stage == stage and asked.precision == precision and asked.plain

    return Feature(f"ZeRO {stage} in {precision}", met)


def _summed(stage: int) -> Feature:
    def met(asked: Wanted) -> bool:
        return asked.stage == stage and asked.sums_in_fp32 and not (asked.offloads or asked.autocast)

    return Feature(f"ZeRO {stage} in bf16 with fp32 accumulation", met, "data_types.grad_accum_dtype")


def _offloaded(stage: int) -> Feature:
    def met(asked: Wanted) -> bool:
        return asked.stage == stage and asked.offloads

    return Feature(f"ZeRO {stage} with CPU offload", met, "zero_optimization.offload_optimizer.device")


def _autocast(stage: int, precision: str) -> Feature:
    def met(asked: Wanted) -> bool:
        return asked.stage == stage and asked.autocast == precision and not asked.offloads

    return Feature(f"ZeRO {stage} under torch_autocast in {precision}", met, "torch_autocast.dtype")


OVERLAP: Final = Feature(
    "communication that overlaps",
    lambda asked: asked.on("zero_optimization.overlap_comm"),
    "zero_optimization.overlap_comm",
)
SCATTERED: Final = Feature(
    "ZeRO 1 and 2 without contiguous gradients",
    lambda asked: asked.stage in (1, 2) and asked.off("zero_optimization.contiguous_gradients") and not asked.offloads,
    "zero_optimization.contiguous_gradients",
)
SPARSE: Final = Feature(
    "sparse_gradients on ZeRO 0",
    lambda asked: asked.stage in (0, None) and asked.on("sparse_gradients"),
    "sparse_gradients",
)
_FETCHED: Final = "zero_optimization.stage3_use_all_reduce_for_fetch_params"
_FETCHED_TOO: Final = "zero_optimization.use_all_reduce_for_fetch_params"  # DeepSpeed takes its field's own name, too
FETCHED: Final = Feature(
    "ZeRO 3 that gathers weights by all-reduce",
    lambda asked: asked.stage in (3, None) and (asked.on(_FETCHED) or asked.on(_FETCHED_TOO)),
    _FETCHED,
    other_key=_FETCHED_TOO,
)
AUTOTP: Final = Feature("AutoTP", lambda asked: autotp_size(asked.config) > 1, SIZE_OF_AUTOTP)
CALLERS: Final = Feature("windows that the caller ends", lambda asked: asked.callers, f"{SECTION}.boundary")
COALESCED: Final = Feature("coalesce_grad_reduction()", _never, "")
MOVED_OFFLOADED: Final = Feature("offload_states() with offloaded optimizer states", _never, "")
L2_ON_CPU: Final = Feature("DeepSpeed's Adam with adam_w_mode: false, on a CPU", _never, "", "cpu")
SUMMED_EXPERTS_ON_CPU: Final = Feature(
    "DeepSpeed's MoE in bf16 with fp32 accumulation on ZeRO 1, on a CPU", _never, "", "cpu"
)
PIPELINES: Final = Feature("pipeline parallelism", _never, "")
LEFT_OUT: Final = Feature("parameters that some passes leave out", _never, "")

FEATURES: Final = (
    *(_plain(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")),
    *(_summed(stage) for stage in (1, 2, 3)),
    *(_offloaded(stage) for stage in (1, 2, 3)),
    *(_autocast(stage, precision) for stage in range(4) for precision in ("bf16", "fp16")),
    OVERLAP,
    SCATTERED,
    SPARSE,
    FETCHED,
    AUTOTP,
    CALLERS,
    COALESCED,
    MOVED_OFFLOADED,
    L2_ON_CPU,
    SUMMED_EXPERTS_ON_CPU,
    PIPELINES,
    LEFT_OUT,
)
"""Every feature that has a row in the table of docs/versions.md, in its order."""


def named(name: str) -> Feature:
    """Return the feature of a name.

    Raises:
        KeyError: there is none.
    """
    return next((one for one in FEATURES if one.name == name), None) or _unknown(name)


def _unknown(name: str) -> Feature:
    raise KeyError(name)
