"""What DeepSpeed hands on, as it is, to an optimizer or a scheduler, and comments in sections that take none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from ds_parity.config.faults import ABSENT, Fault, refuse
from ds_parity.config.features import Wanted
from ds_parity.config.known_keys import KEYS, SCHEDULERS
from ds_parity.config.settings import AUTO
from ds_parity.config.unfilled import within
from ds_parity.values import whole

_OWN_SCHEDULERS: Final = frozenset({"LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"})
_HANDED_ON: Final = ("optimizer", "scheduler")
_SECTIONS: Final = KEYS.keys() | {*_HANDED_ON, *(f"{name}.params" for name in _HANDED_ON)}
_COMMENTS: Final = frozenset({"comment", "comments"})  # a section is called comet
_NEEDED: Final = ("lr", "betas", "eps", "weight_decay", "momentum")
_ONE: Final = ("lr", "weight_decay", "momentum")  # no list of several
_OF_NUMBERS: Final = ("_lr", "_steps", "_rate", "_ratio")  # so end what schedulers take numbers for
_OFFLOADED: Final = ("offload_param", "offload_optimizer")
_PARTITIONED: Final = 3  # the stage that reads them from an NVMe
_NUMBER: Final = "must be a number: DeepSpeed hands it on as it is, and what it is handed to raises, or steps wrongly"


def is_comment(key: object) -> bool:
    """Return whether a key begins with a mark, or is called a comment: DeepSpeed has none such."""
    return isinstance(key, str) and (not key[:1].isalpha() or key in _COMMENTS)


def without_comments(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a section holds beside comments."""
    return {key: value for key, value in section.items() if not is_comment(key)}


def comments(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the comments in DeepSpeed's sections, whose models refuse them; it ignores those beside the sections.

    Args:
        config: a section.
        path: where it stands; "" for the whole configuration.

    Yields:
        The path of a comment, its section, and its key there.
    """
    for key, value in config.items():
        inner = f"{path}.{key}".lstrip(".")
        if path and is_comment(key):
            yield inner, config, key
        elif inner in _SECTIONS and isinstance(value, dict):
            yield from comments(value, inner)


def refuse_handed_on(config: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
    """Raise ConfigError for what DeepSpeed, an optimizer or a scheduler would raise a TypeError or a ValueError for.

    Args:
        config: an extended or a plain DeepSpeed configuration.
        optimizer: whether the optimizer is made of the section of that name.
        scheduler: likewise.
    """
    refuse(handed_on(config, optimizer=optimizer, scheduler=scheduler))


def handed_on(config: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> list[Fault]:
    """Return what `refuse_handed_on` refuses, which takes the same arguments."""
    of_optimizer = _of_params(config, "optimizer") if optimizer else ()
    of_scheduler = (*_of_params(config, "scheduler"), *_of_scheduler(config)) if scheduler else ()
    return [*of_optimizer, *of_scheduler, *_of_zero(config), *_of_steps(config)]


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return without_comments(within(config, name))


def _of_params(config: Mapping[str, Any], section: str) -> Iterator[Fault]:
    if not isinstance(_section(config, section).get("type"), str):
        return  # nothing is built of it
    given = _section(config, section).get("params")
    if given is not None and given != AUTO and not isinstance(given, Mapping):
        yield Fault(f"{section}.params", given, "must be an object of names and values", 'write "params": {...}')
    for key, value in _section(_section(config, section), "params").items():
        parts = value if isinstance(value, list | tuple) else [value]
        if any(_is_written_number(it) for it in parts):
            yield Fault(f"{section}.params.{key}", value, _NUMBER, "write it without quotes")
        elif (
            (key in _NEEDED and value != AUTO and (not parts or any(map(_is_no_number, parts))))
            or (key in _ONE and parts is value)
            or (key.endswith(_OF_NUMBERS) and isinstance(value, bool))
        ):
            yield Fault(f"{section}.params.{key}", value, _NUMBER, "write one, or leave it out")
        elif key == "betas" and value != AUTO and len(parts) < 2:
            yield Fault(f"{section}.params.betas", value, "must be two numbers", "write both, such as [0.9, 0.999]")


def _of_zero(config: Mapping[str, Any]) -> Iterator[Fault]:
    for key, value in _section(config, "zero_optimization").items():
        if _is_written_number(value) and whole(value) is None:
            yield Fault(f"zero_optimization.{key}", value, "must be a whole number", "write one, without quotes")
    for key in _OFFLOADED if Wanted(config).stage == _PARTITIONED else ():
        where = within(within(config, "zero_optimization"), key)
        if where.get("device") == "nvme" and where.get("nvme_path") is None:
            path, rule = f"zero_optimization.{key}.nvme_path", "is needed where the device is nvme"
            yield Fault(path, where.get("nvme_path", ABSENT), rule, "write a folder on the NVMe, the same on all ranks")


def _of_steps(config: Mapping[str, Any]) -> Iterator[Fault]:
    # DeepSpeed divides the number of a step by it, in the first one.
    value = config.get("steps_per_print")
    if value is not None and not (isinstance(value, int | float) and value):
        yield Fault("steps_per_print", value, "must be a number other than 0", "write one, without quotes, or null")


def _of_scheduler(config: Mapping[str, Any]) -> Iterator[Fault]:
    # runtime/engine.py, _scheduler_from_config (0.19.8).
    scheduler, asked = _section(config, "scheduler"), Wanted(config)
    name = scheduler.get("type")
    if not isinstance(name, str) or name == AUTO:
        return
    if scheduler.get("params") is None:
        rule = "DeepSpeed builds no scheduler without its parameters"
        yield Fault("scheduler.params", scheduler.get("params", ABSENT), rule, 'write "params": {...}, which may be {}')
    if name in SCHEDULERS - _OWN_SCHEDULERS and (asked.stage not in (0, None) or asked.half):
        rule = "DeepSpeed gives a scheduler of torch's what wraps the optimizer, which it refuses"
        way_out = f"leave the section out, and give initialize() lr_scheduler=lambda optimizer: {name}(optimizer, ...)"
        yield Fault("scheduler.type", name, rule, way_out)


def _is_no_number(value: object) -> bool:
    return (
        value is None
        or isinstance(value, bool | str | Mapping | list | tuple)
        or (isinstance(value, float) and math.isnan(value))
    )


def _is_written_number(value: object) -> bool:
    """Whether a text is a number, or a list of numbers, that was put in quotes."""
    if not isinstance(value, str):
        return False
    parts = [part.strip() for part in value.strip(" []()").split(",")]
    with suppress(ValueError):
        return bool([float(part) for part in parts])
    return False
