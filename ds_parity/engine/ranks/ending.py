"""How a process that has talked over gloo comes to its end."""

from __future__ import annotations

import atexit
import time
from functools import cache
from typing import Final

# Far more than a thread needs, on a host that is busy too, and nothing at the end of a training run.
_SECONDS: Final = 0.1


@cache
def rest_at_exit() -> None:
    """Let gloo's threads let go of their tensors before this process ends; asked again, nothing more is done.

    A thread of gloo's lets go of a collective's tensors behind whoever waited for it, and takes Python's lock for that.
    In a process that is ending Python ends such a thread instead, in the middle of a destructor of C++, and the process
    with it: `terminate called without an active exception`, code -6, behind all its work (torch 2.13.0; 10 of 25 pairs
    of ranks that ended right behind an `all_gather_object`, and 0 of 25 that slept for 10 ms; pytorch/pytorch#179291,
    pytorch/pytorch#190489). Ranks that save last end like that, because they tell each other that they have saved.
    """
    atexit.register(time.sleep, _SECONDS)
