"""Objects of JSON that give a key more than once: JSON allows it, and Python takes the last value without a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any


class Repeated(dict[str, Any]):
    """An object with a key that was given more than once; the last value is the one that it holds.

    Attributes:
        twice: the keys that were given more than once, in their order.
        ambiguous: those of them whose values are not all equal.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        times = Counter(key for key, _ in pairs)
        self.twice = tuple(key for key in self if times[key] > 1)
        self.ambiguous = tuple(dict.fromkeys(key for key, value in pairs if self[key] != value))


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, `Repeated` where a key was given more than once: the `object_pairs_hook` of readers."""
    known = dict(pairs)
    return known if len(known) == len(pairs) else Repeated(pairs)


def repeated(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key that was given more than once, at any depth, by its dotted path, with the value that it holds."""
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from repeated(value, f"{path}{index}.")
    elif isinstance(node, dict):
        for key in node.twice if isinstance(node, Repeated) else ():
            yield f"{path}{key}", node[key]
        for key, value in node.items():
            yield from repeated(value, f"{path}{key}.")
