"""How a process was started, where DeepSpeed goes wrong with it on some ranks alone, or without a word."""

from __future__ import annotations

import os
from typing import Any

from ds_parity.errors import ConfigError


def refuse_local_rank(args: Any) -> None:
    """Raise where DeepSpeed would: on some ranks alone, while the others wait for them in its initialize().

    Args:
        args: what the command line says, with or without a local_rank; None for nothing.

    Raises:
        ConfigError: its local_rank is not the one of the launcher (runtime/engine.py, _do_args_sanity_check, 0.19.8).
    """
    given, there = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if given is None or there is None or (isinstance(given, int) and (given < 0 or str(given) == there)):
        return
    raise ConfigError(
        f"args.local_rank = {given!r}, and LOCAL_RANK is {there}: both say which of this machine's ranks a process is; "
        "take args.local_rank from the launcher, or leave it at -1"
    )


def refuse_without_assertions() -> None:
    """Raise where Python runs no assertions, by which DeepSpeed refuses what it would do wrong.

    One of them stops a block that a forward runs twice under reentrant checkpointing on ZeRO 3 (stage3.py, 0.19.8):
    without it a window of two passes makes a step that is wrong by half, and nothing says so.

    Raises:
        ConfigError: Python was started with -O, or PYTHONOPTIMIZE is set.
    """
    if __debug__:
        return
    raise ConfigError(
        "Python runs without assertions (-O, or PYTHONOPTIMIZE in the environment): DeepSpeed refuses by assertions "
        "what it would do wrong, so that wrong steps would be taken without a word; start without -O, and unset "
        "PYTHONOPTIMIZE on every node"
    )
