"""What a row of the matrix needs that need not be installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Final


def lacking(names: Iterable[str]) -> str | None:
    """Return what is not installed of what is named, as a sentence; None where all is.

    Args:
        names: of `transformers`, `libaio` and `a C++ compiler`.
    """
    missing = [name for name in names if not _CHECKS[name]()]
    return f"not run: {' and '.join(missing)} would be needed, and can't be found here" if missing else None


@cache
def _has_transformers() -> bool:
    return find_spec("transformers") is not None


@cache
def _has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@cache
def _has_compiler() -> bool:
    return any(which(name) for name in ("g++", "clang++", "c++"))


_CHECKS: Final[Mapping[str, Callable[[], bool]]] = {
    "transformers": _has_transformers,
    "libaio": _has_libaio,
    "a C++ compiler": _has_compiler,
}
