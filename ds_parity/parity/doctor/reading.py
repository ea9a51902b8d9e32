"""A configuration as DeepSpeed's faults ask for it; each "auto" is read as one of the things that it may become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_parity.config.features import Wanted
from ds_parity.config.refusals import names_fp32
from ds_parity.config.releases import read
from ds_parity.config.settings import AUTO
from ds_parity.values import real, switch

# DeepSpeed clips at 1.0 where the key is missing, since this release.
_CLIPS_BY_ITSELF = (0, 19, 1)


@dataclass(frozen=True)
class Reading:
    """A configuration, read by what decides about faults; it never raises, whatever the configuration holds.

    Attributes:
        config: extended or plain.
        filled_in: what every "auto" of a switch is read as.
        version: of the DeepSpeed that reads it; None: the newest.
    """

    config: Mapping[str, Any]
    filled_in: bool = False
    version: str | None = None

    def raw(self, path: str) -> Any:
        """Return the value at a dotted path, None where it is absent."""
        node: Any = self.config
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def on(self, path: str) -> bool:
        """Whether DeepSpeed takes a switch for on."""
        value = self.raw(path)
        return self.filled_in if value == AUTO else switch(path, value) is True

    def off(self, path: str) -> bool:
        """Whether something is there that DeepSpeed takes for off, whatever "auto" becomes."""
        return (value := self.raw(path)) is not None and switch(path, value) is False

    @property
    def stage(self) -> int:
        """The ZeRO stage; where it is "auto", that of Hugging Face's own examples, 2."""
        stage = Wanted(self.config).stage
        return 2 if stage is None else stage

    @property
    def offloads(self) -> bool:
        """Whether optimizer states lie on the CPU or on a disk."""
        device = self.raw("zero_optimization.offload_optimizer.device")
        return self.on("zero_optimization.cpu_offload") or (
            self.filled_in if device == AUTO else device in ("cpu", "nvme")
        )

    @property
    def autocast_fp16(self) -> bool:
        """Whether torch_autocast runs in fp16."""
        asked = {**(self.raw("torch_autocast") or {}), "enabled": True} if self.on("torch_autocast.enabled") else {}
        return Wanted({"torch_autocast": asked}).autocast == "fp16"

    @property
    def fp16(self) -> bool:
        """Whether DeepSpeed's own fp16 is on."""
        return self.on("fp16.enabled")

    @property
    def bf16(self) -> bool:
        """Whether bf16 is on, in the spelling of its section that DeepSpeed reads."""
        return self.on(f"{Wanted(self.config).bf16_section}.enabled")

    @property
    def fp32(self) -> bool:
        """Whether weights are in fp32, with torch_autocast or without."""
        return not self.fp16 and not self.bf16

    @property
    def dynamic(self) -> bool:
        """Whether fp16's loss scale is dynamic."""
        scale = self.raw("fp16.loss_scale")
        return scale in (None, AUTO) or real(scale) == 0

    @property
    def sums_in_fp32(self) -> bool:
        """Whether bf16 gradients are accumulated in fp32."""
        return self.bf16 and names_fp32(self.raw("data_types.grad_accum_dtype"))

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped, which a missing key means since 0.19.1."""
        limit = self.raw("gradient_clipping")
        release = read(self.version or "")
        return limit not in (0, 0.0) if limit is not None else release is None or release.numbers >= _CLIPS_BY_ITSELF

    @property
    def overlaps(self) -> bool:
        """Whether `overlap_comm` is on."""
        return self.on("zero_optimization.overlap_comm")

    @property
    def accumulates(self) -> bool:
        """Whether DeepSpeed itself is told of several passes a step."""
        steps = self.raw("gradient_accumulation_steps")
        return steps == AUTO or (isinstance(steps, int) and steps > 1)

    @property
    def optimizer(self) -> str:
        """The type of the optimizer in lower case, "" where the configuration has none."""
        return str(self.raw("optimizer.type") or "").lower()
