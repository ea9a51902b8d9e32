"""What DeepSpeed hands on as it stands, to an optimizer or a scheduler, and what no section of its takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from ds_parity.config.faults import ABSENT, Fault
from ds_parity.config.known_keys import KEYS, SCHEDULERS
from ds_parity.config.settings import AUTO

_OWN_SCHEDULERS: Final = frozenset({"LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"})
_HANDED_ON: Final = ("optimizer", "scheduler")
_SECTIONS: Final = KEYS.keys() | {*_HANDED_ON, *(f"{name}.params" for name in _HANDED_ON)} - {""}
_COMMENTS: Final = frozenset({"comment", "comments"})  # a section is called comet
_NUMBER: Final = "must be a number: DeepSpeed hands it on as it is, and what it is handed to raises, or steps wrongly"


def is_comment(key: object) -> bool:
    """Return whether a key begins with a mark, or is called a comment: DeepSpeed has none such."""
    return isinstance(key, str) and (not key[:1].isalpha() or key in _COMMENTS)


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


def faults(config: Mapping[str, Any], *, plain: bool) -> Iterator[Fault]:
    """Yield what the optimizer or the scheduler that is built of a configuration would raise behind.

    Args:
        config: an extended or a plain DeepSpeed configuration.
        plain: the engine trains with an optimizer of torch's, which ZeRO and half precision wrap.
    """
    for section in _HANDED_ON:
        given = config.get(section)
        params = given.get("params") if isinstance(given, Mapping) else None
        for key, value in params.items() if isinstance(params, Mapping) else ():
            if any(_is_written_number(it) for it in (value if isinstance(value, list) else [value])):
                yield Fault(f"{section}.params.{key}", value, _NUMBER, "write it without quotes")
            elif value is None and key == "lr":
                yield Fault(f"{section}.params.{key}", value, _NUMBER, "write one, or leave it out")
    yield from _of_scheduler(config, plain=plain)
    zero = config.get("zero_optimization")
    for key, value in zero.items() if isinstance(zero, Mapping) else ():
        if _is_written_number(value) and not _is_whole(value):
            rule = "must be a whole number"
            yield Fault(f"zero_optimization.{key}", value, rule, f"write {float(value):.0f}, without quotes")


def _of_scheduler(config: Mapping[str, Any], *, plain: bool) -> Iterator[Fault]:
    # runtime/engine.py, _scheduler_from_config (0.19.8).
    scheduler = config.get("scheduler")
    name = scheduler.get("type") if isinstance(scheduler, Mapping) else None
    if not isinstance(scheduler, Mapping) or not isinstance(name, str) or name == AUTO:
        return
    if scheduler.get("params") is None:
        rule = "DeepSpeed builds no scheduler without its parameters"
        yield Fault("scheduler.params", scheduler.get("params", ABSENT), rule, 'write "params": {...}, which may be {}')
    if name in SCHEDULERS - _OWN_SCHEDULERS and not plain:
        rule = "DeepSpeed gives a scheduler of torch's what wraps the optimizer, which it refuses"
        way_out = f"leave the section out, and give initialize() lr_scheduler=lambda optimizer: {name}(optimizer, ...)"
        yield Fault("scheduler.type", name, rule, way_out)


def _is_written_number(value: object) -> bool:
    """Whether a text is a number, or a list of numbers, that was put in quotes."""
    if not isinstance(value, str):
        return False
    parts = [part.strip() for part in value.strip(" []()").split(",")]
    with suppress(ValueError):
        return bool([float(part) for part in parts])
    return False


def _is_whole(value: str) -> bool:
    with suppress(ValueError):
        return int(value) is not None
    return False
