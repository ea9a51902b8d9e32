"""Switches and numbers of a DeepSpeed configuration, as DeepSpeed reads them.

Most of its sections are models of pydantic, which take "true", 1 and "on" for a switch and "3" for a whole number. The
others, and the keys at the top level, are taken as they are: there each text is on, "false" too (0.19.8).
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

_MODELS: Final = ("fp16", "bf16", "bfloat16", "zero_optimization", "compile", "hybrid_engine", "tensor_parallel")
_SWITCH: Final = TypeAdapter(bool)
_WHOLE: Final = TypeAdapter(int)


def of_model(path: str) -> bool:
    """Return whether DeepSpeed reads the key at a dotted path by a model of pydantic."""
    section, _, key = path.partition(".")
    return bool(key) and section in _MODELS


def switch(path: str, value: Any) -> bool | None:
    """Return what DeepSpeed takes a switch for; None: for neither, or it is "auto", which is filled in later.

    Args:
        path: dotted, of the key.
        value: what stands there.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if not of_model(path):
        return bool(value)
    try:
        return _SWITCH.validate_python(value)
    except ValidationError:
        return None


def whole(value: Any) -> int | None:
    """Return the whole number that a model of DeepSpeed's reads a value as; None where it takes it for none."""
    try:
        read: Any = _WHOLE.validate_python(value)
    except ValidationError:
        return None
    return read if isinstance(read, int) else None  # of a member of an enum pydantic makes its value, whatever it is


def real(value: Any) -> float | None:
    """Return the number that DeepSpeed reads `fp16.loss_scale` as; None where it takes the value for none."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
