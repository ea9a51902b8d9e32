"""Numbers of a command line that must lie within bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def bounded(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return the `type` of an argument that must be a number from `least` to `most`.

    Args:
        kind: int, or float, of which NaN is refused.
        least: the least that it may be.
        most: the greatest.
    """

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            rule = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"it is {text}, and must be {rule}")
        return value

    read.__name__ = kind.__name__  # which argparse says where the text is no number
    return read
