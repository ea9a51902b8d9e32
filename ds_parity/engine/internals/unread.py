"""A DeepSpeed that nobody has read: what is said of it, what its guards find, and what is refused for that."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ds_parity.config.faults import Fault
from ds_parity.config.features import AUTOTP, Wanted
from ds_parity.config.versions import MEASURED
from ds_parity.engine.internals.guard_list import Changed, changed
from ds_parity.engine.internals.guards import BF16, CLASSES, FP16, INIT, UNFUSED, ZERO3, ZERO12
from ds_parity.engine.internals.installed import installed, unread

_LOG = logging.getLogger("ds_parity")
_Touches = Callable[[Wanted], bool]


def _on(*stages: int) -> _Touches:
    return lambda asked: asked.stage in (*stages, None)


def _half(asked: Wanted) -> bool:
    return asked.stage in (0, None) and asked.precision != "fp32"


def _plain(asked: Wanted) -> bool:
    return asked.stage in (0, None) and asked.precision == "fp32"


# What a change touches, by the class that has changed, and else by the files that rely on it.
_BY_OWNER: Final[Mapping[str, _Touches]] = {
    ZERO12: _on(1, 2),
    ZERO3: _on(3),
    BF16: lambda asked: asked.stage in (1, None) and asked.sums_in_fp32,
    FP16: _half,
    UNFUSED: _half,
    INIT: _on(3),
    # ZeRO 3 alone swaps optimizer states to a disk.
    **dict.fromkeys(CLASSES["Swapper"], _on(3)),
}
_BY_FILE: Final[Mapping[str, _Touches]] = {
    "zero.py": _on(1, 2, 3),
    "zero12.py": _on(1, 2),
    "zero3.py": _on(3),
    "bf16.py": _BY_OWNER[BF16],
    "fp16.py": _half,
    "plain.py": _plain,
    "older_zero12.py": _on(1, 2),
    "older_zero3.py": _on(3),
    "older_leftovers.py": _on(3),
    "older_checkpoints.py": _half,
    # What it does to ZeRO 1 to 3 rests on their classes, which are looked up first.
    "older.py": lambda asked: _half(asked) or _BY_OWNER[BF16](asked),
    "callers_driver.py": lambda asked: asked.callers,
    "tensor_groups.py": AUTOTP.met,
    "groups.py": lambda asked: isinstance(asked.value("sequence_parallel_size"), int),
}
# A change there makes a number wrong that is logged, and no step.
_LOGGED_ALONE: Final = ("counters.py", "monitor.py", "all_weights.py")
# Few models and optimizers meet a change there. DeepSpeed is left as it is then: it is right by itself, or raises, and
# what it does to an Adagrad is seen when the engine is built.
_SEEN_WHEN_BUILT: Final = ("adagrad.py", "broadcast.py")


@functools.cache
def found() -> tuple[Changed, ...]:
    """Return what guards find changed in the installed DeepSpeed, nothing where it is one that was read."""
    return tuple(changed()) if unread() else ()


def say() -> None:
    """Warn of a DeepSpeed that nobody has read, once a process and on the first rank alone."""
    if not unread() or os.environ.get("RANK", "0") != "0":
        return
    names = ", ".join(map(str, MEASURED))
    said = "".join(f"\n  {one.says}" for one in found())
    _LOG.warning(
        "deepspeed %s is installed, which ds_parity was never run with (it was with %s): its steps are unverified. %s; "
        "run `ds-parity verify` on your configuration before you rely on it, or install deepspeed==%s",
        installed() or "of a version without numbers",
        names,
        f"Guards find that DeepSpeed has changed what ds_parity relies on, and what that touches is refused:{said}\n"
        if said
        else "Guards find nothing changed of what ds_parity relies on",
        MEASURED[-1],
    )


def refused(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for everything that a configuration asks for and a guard finds changed.

    Args:
        config: an extended or a plain DeepSpeed configuration.
    """
    asked = Wanted(config)
    for one in found():
        if touches(one, asked):
            rule = f"ds_parity relies on what has changed there: {one.says}"
            yield Fault("deepspeed", str(installed() or "?"), rule, f"install deepspeed=={MEASURED[-1]}")


def touches(change: Changed, asked: Wanted) -> bool:
    """Return whether steps of a configuration rely on what has changed."""
    relying = _files(change)
    if relying and all(name in _SEEN_WHEN_BUILT for name in relying):
        return False
    by_owner = _BY_OWNER.get(change.owner)
    if by_owner is not None:
        return by_owner(asked)
    return any(_BY_FILE.get(name, _everything)(asked) for name in relying if name not in _LOGGED_ALONE)


def is_unsure(file: str) -> bool:
    """Return whether guards find changed what a file of this room relies on."""
    return any(file in _files(change) for change in found())


def _files(change: Changed) -> list[str]:
    return [name for name in change.used_in.replace(" and ", ", ").replace("internals/", "").split(", ") if name]


def _everything(_: Wanted) -> bool:
    return True
