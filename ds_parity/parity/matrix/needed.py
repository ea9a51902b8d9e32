"""What a row of the matrix needs that need not be installed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Final

# The packages of an extra of ds_parity that rows import.
EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "ds_parity[hf]": ("transformers", "accelerate"),
    "ds_parity[peft]": ("peft", "transformers", "accelerate"),
}
LIBAIO: Final = "libaio"
COMPILER: Final = "a C++ compiler"


def lacking(names: Iterable[str]) -> str | None:
    """Return why a row can't be run here, and how it can; None where all is there that it needs.

    Args:
        names: of `EXTRAS`, `LIBAIO` and `COMPILER`.
    """
    return "; ".join(filter(None, map(_lacking, names))) or None


def _lacking(name: str) -> str | None:
    if name in EXTRAS:
        absent = [package for package in EXTRAS[name] if find_spec(package) is None]
        return f"{', '.join(absent)} is missing: install {name}" if absent else None
    found = {LIBAIO: _has_libaio, COMPILER: _has_compiler}[name]()
    return None if found else f"{name} can't be found here: install it with the system's packages"


@cache
def _has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@cache
def _has_compiler() -> bool:
    return any(which(name) for name in ("g++", "clang++", "c++"))
