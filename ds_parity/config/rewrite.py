"""Extended configuration in, plain DeepSpeed configuration out, with every change and its reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_parity.config.autotp import TENSOR_PARALLEL, autotp_size
from ds_parity.config.faults import ABSENT, Fault, refuse
from ds_parity.config.features import Wanted
from ds_parity.config.handed_on import comments
from ds_parity.config.load import plain_copy
from ds_parity.config.refusals import refusals
from ds_parity.config.settings import (
    AUTO,
    BATCH,
    COUNT_RULE,
    MICRO,
    PASSES,
    SECTION,
    STEPS,
    Settings,
    is_count,
    parse,
)

_CLIPPING_WHY = (
    "DeepSpeed's default became 1.0 after 0.19.0 and was 0 before, so a missing key means different things; "
    "write 0.0 for no clipping"
)
_MANAGED_WHY = (
    "ds_parity sets the boundary itself, and DeepSpeed's set_gradient_accumulation_boundary asserts without it"
)
_AUTOTP_WHY = (
    "DeepSpeed checks it by all ranks, and on ZeRO 3 once more by the data-parallel ones, which AutoTP makes fewer; it "
    "computes the number itself"
)
_WHOLE_LOGITS_WHY = (
    "where it is absent, DeepSpeed gives each rank the logits of a part of the vocabulary if the model ties its "
    "embedding, and a loss of one's own would take them for all; write true for a loss that knows of the parts"
)
_AUTO_WHY = 'left as it is while train_micro_batch_size_per_gpu is "auto": what fills that in settles the batch'
# Each section has a switch of its own.
_CURRICULUM = tuple(
    f"data_efficiency{section}.enabled" for section in ("", ".data_sampling", ".data_sampling.curriculum_learning")
)


@dataclass(frozen=True)
class Change:
    """One key, by its dotted path, before and after (`ABSENT` where it is not there), and why it was changed."""

    key: str
    before: Any
    after: Any
    why: str


@dataclass(frozen=True)
class Rewrite:
    """A plain DeepSpeed configuration, what was changed to get it, and the settings that it was read with."""

    config: dict[str, Any]
    changes: tuple[Change, ...]
    settings: Settings


def rewrite(config: Mapping[str, Any], dp_world_size: int) -> Rewrite:
    """Turn an extended configuration into a plain DeepSpeed one; the input is not touched.

    Rewriting the output with the same extra keys gives the same output.

    Args:
        config: the extended configuration, as `load_config` reads it.
        dp_world_size: the number of data-parallel ranks (>= 1).

    Returns:
        The plain configuration, every change with its reason, and the settings.

    Raises:
        ConfigError: a fault in the extra keys, none that switches ds_parity on, a batch size that contradicts it,
            or DeepSpeed options that would go wrong; all of a kind in one message.
    """
    settings = parse(config)
    if settings is None:
        way_out = f'add for example "{PASSES}": 64, or give the configuration to DeepSpeed as it is'
        refuse([Fault(PASSES, ABSENT, "there is nothing to rewrite without it", way_out)])
    if not is_count(dp_world_size):
        refuse([Fault("dp_world_size", dp_world_size, COUNT_RULE, "give the number of data-parallel ranks")])
    assert settings is not None
    batch = _Batch(settings, dp_world_size, autotp_size(config))
    refuse([*batch.faults(config), *refusals(config)])
    draft = _Draft(plain_copy(config))
    draft.remove(PASSES, "read by ds_parity; it is no key of DeepSpeed")
    draft.remove(SECTION, "read by ds_parity; it is no section of DeepSpeed")
    for path, section, key in [*comments(draft.config)]:
        draft.take(path, section, key, "a comment, which DeepSpeed does not take in its sections")
    batch.write(draft)
    draft.default("gradient_clipping", 1.0, _CLIPPING_WHY)
    if draft.config.get("managed_gradient_accumulation") is False:
        draft.set("managed_gradient_accumulation", True, _MANAGED_WHY)
    if autotp_size(config) > 1:
        draft.default_of(TENSOR_PARALLEL, "vocab_parallel_lm_head", False, _WHOLE_LOGITS_WHY)
    return Rewrite(draft.config, tuple(draft.changes), settings)


@dataclass
class _Draft:
    """The configuration that is being rewritten, and the changes so far."""

    config: dict[str, Any]
    changes: list[Change] = field(default_factory=list)

    def remove(self, key: str, why: str) -> None:
        if key in self.config:
            self.take(key, self.config, key, why)

    def take(self, path: str, section: dict[str, Any], key: str, why: str) -> None:
        self.changes.append(Change(path, section.pop(key), ABSENT, why))

    def set(self, key: str, value: Any, why: str) -> None:
        before = self.config.get(key, ABSENT)
        if before != value:
            self.config[key] = value
            self.changes.append(Change(key, before, value, why))

    def default(self, key: str, value: Any, why: str) -> None:
        if key not in self.config:
            self.set(key, value, why)

    def default_of(self, section: str, key: str, value: Any, why: str) -> None:
        before = self.config[section].get(key, ABSENT)
        if before in (None, ABSENT):
            self.config[section][key] = value
            self.changes.append(Change(f"{section}.{key}", before, value, why))

    def keep(self, key: str, why: str) -> None:
        self.changes.append(Change(key, self.config[key], self.config[key], why))


@dataclass(frozen=True)
class _Batch:
    """DeepSpeed's batch triple for a number of passes, and the arithmetic behind it.

    Attributes:
        settings: the extra keys.
        ranks: data-parallel ranks.
        sharing: ranks that share each micro-batch by AutoTP. DeepSpeed takes them for data-parallel ones where it
            checks `train_batch_size` (runtime/config.py, 0.19.8), but for the second look that ZeRO 3 takes at it
            (zero/partition_parameters.py, Init). So none is written.
    """

    settings: Settings
    ranks: int
    sharing: int = 1

    @property
    def passes(self) -> int:
        # Where the caller closes windows and gives no nominal target, DeepSpeed is told of one pass a rank.
        return self.settings.passes or self.ranks

    @property
    def steps(self) -> int:
        # Rounded up: DeepSpeed's own boundary, buffers and timers may come late, but never inside a window.
        return -(-self.passes // self.ranks)

    @property
    def train_batch_size(self) -> int | None:
        """What DeepSpeed is given; None while the micro-batch size is "auto". May be greater than any count."""
        micro = self.settings.train_micro_batch_size_per_gpu
        return micro * self.steps * self.ranks * self.sharing if isinstance(micro, int) else None

    @property
    def steps_why(self) -> str:
        if not self.settings.passes:
            return f"{SECTION}.boundary is caller: step() ends a window, and DeepSpeed is told of one pass a rank"
        if self.passes % self.ranks == 0:
            return f"{self.passes} passes / {self.ranks} data-parallel ranks = {self.steps} passes a rank"
        micro = self.settings.train_micro_batch_size_per_gpu
        target = f"{self.passes} micro-batches" if micro == AUTO else f"{self.settings.target} {self.settings.count}s"
        return (
            f"{self.passes} passes / {self.ranks} data-parallel ranks = {self.passes / self.ranks:.4g}, rounded up to "
            f"{self.steps} passes a rank: the window still closes at {target}, DeepSpeed is only told the next whole "
            f"number of passes a rank"
        )

    def faults(self, config: Mapping[str, Any]) -> Iterator[Fault]:
        """Yield what contradicts the passes in a train_batch_size or gradient_accumulation_steps beside them."""
        for key in (BATCH, STEPS):
            given = config.get(key)
            if given in (None, AUTO) or (key == BATCH and type(given) is int and given == self.train_batch_size):
                continue
            if not is_count(given):
                yield Fault(key, given, f'{COUNT_RULE}, or "auto"', f"leave it out: {self._decides} decides it")
            elif key == STEPS and given != self.steps:
                rule = f"contradicts {self._decides}: {self.steps_why}"
                # accelerate writes 1 where the key is not there, so that leaving it out does not help there.
                of_loops = (
                    'with accelerate, which writes 1 for a missing key, write "auto"; with a loop that calls step() '
                    f'once for several backwards, write "boundary": "caller" in {SECTION} in place of {PASSES}; '
                    if given == 1
                    else ""
                )
                yield Fault(key, given, rule, of_loops + self._way_out_of_steps(given))
            elif key == BATCH:
                yield from self._batch_faults(given)
        yield from self._faults_of_a_curriculum(config)

    def _faults_of_a_curriculum(self, config: Mapping[str, Any]) -> Iterator[Fault]:
        # DeepSpeedDataSampler moves it once for as many samples as a step is told to have (runtime/data_pipeline/
        # data_sampling/data_sampler.py, 0.19.8), and not by steps.
        wanted = Wanted(config)
        if (self.settings.passes and self.passes % self.ranks == 0) or not all(map(wanted.on, _CURRICULUM)):
            return
        rule = f"its difficulty moves once for {self.steps} micro-batches a rank, and not once a step: {self.steps_why}"
        multiple = f"make {PASSES} a multiple of the {self.ranks} data-parallel ranks"
        own = f"give {PASSES}, the passes of all ranks in each window (also where step() ends it)"
        yield Fault(_CURRICULUM[-1], True, rule, multiple if self.settings.passes else own)

    def _batch_faults(self, given: int) -> Iterator[Fault]:
        micro = self.settings.train_micro_batch_size_per_gpu
        if not isinstance(micro, int):
            if given % self.passes and given % (self.steps * self.ranks * self.sharing):
                rule = f"no micro-batch size fits: {given} / {self.passes} passes = {given / self.passes:.4g}"
                yield Fault(BATCH, given, rule, f"write a multiple of {self.passes}, or leave it out")
            return
        if not self.settings.passes:
            ranks = self.ranks * self.sharing
            rule = f"is not {micro} a micro-batch x {ranks} ranks = {self.train_batch_size}: {self.steps_why}"
            yield Fault(BATCH, given, rule, "leave it out")
            return
        target = self.settings.target
        if given != target:
            rule = f"contradicts {PASSES} x {MICRO} = {self.passes} x {micro} = {target} rollouts an optimizer step"
            yield Fault(BATCH, given, rule, self._way_out(str(target)))

    @property
    def _decides(self) -> str:
        return f"{SECTION}.boundary" if not self.settings.passes else PASSES

    def _way_out(self, right: str) -> str:
        return (
            f"write {right} (in the arguments of a Hugging Face Trainer or Accelerator too), or leave it out, "
            f"or change {self._decides}"
        )

    def _way_out_of_steps(self, given: int) -> str:
        if self.settings.passes:
            return self._way_out(str(self.steps))
        return (
            f"leave it out; where a Hugging Face Trainer or Accelerator steps by it, keep it, and add {PASSES}: "
            f"{given * self.ranks} (it x {self.ranks} data-parallel ranks)"
        )

    def write(self, draft: _Draft) -> None:
        micro = self.settings.train_micro_batch_size_per_gpu
        if not isinstance(micro, int):
            for key in (BATCH, MICRO, STEPS):
                if draft.config.get(key) == AUTO:
                    draft.keep(key, _AUTO_WHY)
            return
        batch = self.train_batch_size
        batch_why = f"{micro} a micro-batch x {self.steps} passes a rank x {self.ranks} data-parallel ranks = {batch}"
        uneven = "" if self.passes % self.ranks == 0 else f"; {self.steps_why}"
        draft.set(MICRO, micro, f"{BATCH} / {PASSES} = {draft.config.get(BATCH)} / {self.passes} = {micro}")
        draft.set(STEPS, self.steps, self.steps_why)
        if self.sharing > 1:
            draft.remove(BATCH, _AUTOTP_WHY)
        else:
            draft.set(BATCH, batch, batch_why + uneven)
