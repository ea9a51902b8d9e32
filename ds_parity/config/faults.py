"""One fault in a configuration, and the message that names all of them."""

import difflib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

from ds_parity.errors import ConfigError


class Absent(Enum):
    """The type of `ABSENT`: an enum, since its one member stays itself when it is copied or pickled."""

    ABSENT = "(absent)"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value


ABSENT: Final[Literal[Absent.ABSENT]] = Absent.ABSENT
"""Stands where a key is not there at all (`None` is what JSON's `null` reads as)."""


@dataclass(frozen=True)
class Fault:
    """A key, its value, the rule that it breaks and the way out."""

    key: str
    value: Any
    rule: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.said}; {self.way_out}"

    @property
    def said(self) -> str:
        """The key, its value and the rule."""
        thing = f"{self.key} is absent" if self.value is ABSENT else f"{self.key} = {show(self.value)}"
        return f"{thing}: {self.rule}"


def refuse(faults: Iterable[Fault]) -> None:
    """Raise one ConfigError that names every fault, one a line; do nothing where there is none."""
    lines = [str(fault) for fault in faults]
    if lines:
        count = "" if len(lines) == 1 else f", {len(lines)} faults"
        raise ConfigError("\n  ".join([f"the configuration is refused{count}:", *lines]))


def show(value: Any, limit: int = 120) -> str:
    """Return `value` as it would be written in a JSON file, shortened to `limit` characters; never raise."""
    try:
        text = json.dumps(value, default=repr)
    except Exception:  # a repr may raise anything, and a message about a bad value must still come out
        text = f"({type(value).__name__})"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest(word: Any, options: Collection[str], cutoff: float = 0.8) -> str | None:
    """Return the option that `word` was most probably meant to be, in any case, hyphens or not; None if none is."""
    if not isinstance(word, str):
        return None
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), options, n=1, cutoff=cutoff)
    return matches[0] if matches else None
