"""Near misses of DeepSpeed's own keys, most of which DeepSpeed ignores in silence.

The known keys are a table (`known_keys.py`), so that this room needs no DeepSpeed. A suspicion is dropped where the
DeepSpeed that is installed, perhaps a newer one, spells the key in its own sources.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ds_parity.config.faults import Fault, nearest, refuse
from ds_parity.config.handed_on import is_comment
from ds_parity.config.known_keys import KEYS, OPTIMIZERS, SCHEDULERS
from ds_parity.config.settings import AUTO, PASSES, SECTION

# What DeepSpeed's parser does not ask for itself: read elsewhere (deepspeed/__init__.py, 0.19.8), or by versions from
# 0.16 on.
_ALSO: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({PASSES, SECTION, "sequence_parallel_size", "data_parallel_size", "allgather_size", "max_grad_norm"}),
    "aio": frozenset({"thread_count"}),
    "fp16": frozenset({"opt_level", "master_weights_and_grads"}),
    "tensor_parallel": frozenset({"tp_size"}),
}
_ALSO_OPTIMIZERS: Final = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})
_IGNORED: Final = "DeepSpeed ignores it in silence"
_NO_TYPE: Final = "no type of DeepSpeed's or of torch's has this name"


def misspelt(config: Mapping[str, Any]) -> list[Fault]:
    """Return the keys, and the types of optimizer and scheduler, that are nearly spelt like one of DeepSpeed's.

    Values other than these types are not looked at, and neither are keys that begin with a mark, as comments do.

    Args:
        config: a configuration, as `load_config` reads it, extended or plain.

    Returns:
        Each with its path, its value and what was probably meant; none where all is known or altogether unknown.
    """
    faults = [*_keys(config, ""), *_types(config)]
    return [fault for fault in faults if not _spelt_by_deepspeed(fault.key.rsplit(".", 1)[-1], fault.value)]


def refuse_misspelt(config: Mapping[str, Any]) -> None:
    """Refuse near misses of DeepSpeed's keys.

    Raises:
        ConfigError: there are some; one message for all.
    """
    refuse(misspelt(config))


def _keys(section: Mapping[str, Any], path: str) -> Iterator[Fault]:
    known = KEYS[path] | _ALSO.get(path, frozenset())
    for key, value in section.items():
        if not isinstance(key, str):
            continue
        inner = f"{path}.{key}".lstrip(".")
        if key in known:
            if inner in KEYS and isinstance(value, Mapping):
                yield from _keys(value, inner)
        elif not is_comment(key) and (meant := _nearest_key(key, known)):
            yield Fault(inner, value, _IGNORED, f'did you mean "{meant}"?')


def _nearest_key(key: str, known: Collection[str]) -> str | None:
    # Two letters that changed places weigh too much in a short word: tpye.
    turned = (name for name in sorted(known) if len(key) > 3 and sorted(name) == sorted(key))
    return nearest(key, known) or next(turned, None)


def _types(config: Mapping[str, Any]) -> Iterator[Fault]:
    for section, known in (("optimizer", OPTIMIZERS | _ALSO_OPTIMIZERS), ("scheduler", SCHEDULERS)):
        given = config.get(section)
        named = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(named, str) or named == AUTO or _is_type(named, known):
            continue
        if meant := _nearest_type(named, known):
            yield Fault(f"{section}.type", named, _NO_TYPE, f'did you mean "{meant}"?')


def _is_type(named: str, known: Collection[str]) -> bool:
    # DeepSpeed takes its own optimizers, which are written in lower case here, in any case (runtime/config.py, 0.19.8).
    return named in known or named.lower() in known


def _nearest_type(named: str, known: Collection[str]) -> str | None:
    # Of names that differ in case alone, the one with capitals is what people write.
    spelt = {name.lower(): name for name in sorted(known, reverse=True)}
    meant = nearest(named, spelt)
    return None if meant is None else spelt[meant]


def _spelt_by_deepspeed(key: str, value: Any) -> bool:
    word = re.escape(str(value) if key == "type" else key)
    return any(re.search(rf"""^\s+{word}\s*:|["']{word}["']""", text, re.MULTILINE) for text in _sources())


@cache
def _sources() -> tuple[str, ...]:
    """Return the text of the modules in which the installed DeepSpeed names its keys; none where there is none."""
    spec = find_spec("deepspeed")  # of a package at the top, which this does not import
    if spec is None or spec.origin is None:
        return ()
    root = Path(spec.origin).parent
    paths = [path for pattern in ("*config*.py", "constants.py") for path in sorted(root.rglob(pattern))]
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)
