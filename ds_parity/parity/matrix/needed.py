"""What a row of the matrix needs that need not be installed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
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
# DeepSpeed's names of what it compiles for its optimizers with CPU offload.
OPERATORS: Final = {"Adagrad": "CPUAdagradBuilder", "Lion": "CPULionBuilder"}


def lacking(names: Iterable[str]) -> str | None:
    """Return why a row can't be run here, and how it can; None where all is there that it needs.

    Args:
        names: of `EXTRAS`, `OPERATORS`, `LIBAIO` and `COMPILER`.
    """
    return "; ".join(filter(None, map(_lacking, names))) or None


def _lacking(name: str) -> str | None:
    if name in EXTRAS:
        absent = [package for package in EXTRAS[name] if find_spec(package) is None]
        return f"{', '.join(absent)} is missing: install {name}" if absent else None
    if name in OPERATORS.values():
        return None if _has_operator(name) else f"DeepSpeed {version('deepspeed')} has no {name} for this accelerator"
    found = {LIBAIO: _has_libaio, COMPILER: _has_compiler}[name]()
    return None if found else f"{name} can't be found here: install it with the system's packages"


@cache
def _has_operator(name: str) -> bool:
    from deepspeed.accelerator import get_accelerator

    # On a CPU, releases before 0.19.8 have a stand-in that raises as soon as it is loaded.
    return bool(get_accelerator().get_op_builder(name).__name__ == name)


@cache
def _has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@cache
def _has_compiler() -> bool:
    return any(which(name) for name in ("g++", "clang++", "c++"))
