"""Replaces a name of DeepSpeed's, or of an object, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_NOTHING: Final = object()


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Return a context in which a name of a class or module is something else, for all threads.

    Args:
        owner: the class, module or object.
        name: that it has.
        by: what the name is meanwhile.
    """
    # What an object has of its class, or a class of another, is not to be its own behind this.
    its_own = vars(owner).get(name, _NOTHING)
    # torch lets only a module take the place of a module's part, by its own __setattr__.
    kind = type if isinstance(owner, type) else object
    kind.__setattr__(owner, name, by)
    try:
        yield
    finally:
        if its_own is _NOTHING:
            kind.__delattr__(owner, name)
        else:
            kind.__setattr__(owner, name, its_own)


@contextmanager
def wrapped(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Return a context in which a function of a class is one that is made of it; nothing changes where it has none.

    Args:
        owner: the class.
        name: that a newer DeepSpeed may have given up.
        by: given the function, it returns what stands in its place.
    """
    function = getattr(owner, name, None)
    if function is None:
        yield
        return
    with replaced(owner, name, by(function)):
        yield
