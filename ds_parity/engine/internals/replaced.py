"""Replaces a name of DeepSpeed's for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Return a context in which a name of a class or module is something else, for all threads.

    Args:
        owner: the class, module or object.
        name: that it has.
        by: what the name is meanwhile.
    """
    own = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, own)
