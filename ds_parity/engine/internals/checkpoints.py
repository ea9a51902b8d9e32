"""How DeepSpeed refuses a checkpoint, and what it leaves to the caller of its save."""

from __future__ import annotations

from deepspeed.runtime.zero.utils import ZeRORuntimeException

REFUSALS: tuple[type[Exception], ...] = (ZeRORuntimeException, AssertionError)
"""A checkpoint of another number of ranks: a rank that finds no file of its own raises a bare assertion."""
