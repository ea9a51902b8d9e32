"""Values that are still "auto" where an engine is built: a framework would have put numbers there by then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ds_parity.config.faults import Fault, refuse
from ds_parity.config.settings import AUTO

_PRECISIONS: Final = ("bf16", "fp16")
_RULE: Final = '"auto" is filled in by the Trainer of transformers or by accelerate, and nothing has filled it in here'


def refuse_unfilled(config: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Raise ConfigError where DeepSpeed would take "auto" for a number, or for a precision or stage not asked for.

    Bare DeepSpeed ends in a TypeError or ValueError behind the first, and without a word trains in fp32 behind
    `bf16.enabled` = "auto", and on ZeRO 0 behind that of the stage. Elsewhere in `zero_optimization` it takes its
    default for "auto".

    Args:
        config: what DeepSpeed is to be given.
        optimizer: whether the optimizer is made of the section of that name.
        scheduler: likewise.
    """
    refuse(
        Fault(path, AUTO, _RULE, "write the value, or let one of these start DeepSpeed")
        for path in _unfilled(config, optimizer=optimizer, scheduler=scheduler)
    )


def _unfilled(config: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> Iterator[str]:
    if config.get("gradient_clipping") == AUTO:
        yield "gradient_clipping"
    if within(config, "zero_optimization").get("stage") == AUTO:
        yield "zero_optimization.stage"
    yield from (f"{name}.enabled" for name in _PRECISIONS if within(config, name).get("enabled") == AUTO)
    for name, used in (("optimizer", optimizer), ("scheduler", scheduler)):
        params = within(within(config, name), "params") if used else {}
        yield from (f"{name}.params.{key}" for key, value in params.items() if isinstance(value, str) and value == AUTO)


def within(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a section of a configuration; an empty one where none is there, or something else is."""
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}
