"""An engine whose load has raised may have a part of a checkpoint in it: it may not train on, nor save that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ds_parity.errors import CheckpointError

HALF_WAY: Final = "Loading ends half way, so start a new engine"
"""What an error says that is raised behind the beginning of a load."""


def refuse_half_loaded(load_dir: str | None, what: str) -> None:
    """Raise CheckpointError where a load has raised behind its beginning, and no whole one has followed.

    Args:
        load_dir: from which the load that raised was to load; None where none has.
        what: is refused, for the message.
    """
    if load_dir is not None:
        raise CheckpointError(
            f"{what}: load_checkpoint({load_dir!r}) has raised in this engine, and ended half way, so that its "
            "weights, its optimizer's states and its counts may be those of two runs. Start a new engine, or load a "
            "whole checkpoint into this one: one that loads, with the states of the optimizer and of the scheduler, "
            "with load_module_strict, and without a custom_load_fn"
        )


def is_whole(engine: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a load leaves nothing in the engine of what was there before.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
    """
    scheduled = options["load_lr_scheduler_states"] or engine.lr_scheduler is None
    weights = options["load_module_strict"] and options["custom_load_fn"] is None
    return bool(scheduled and weights and options["load_optimizer_states"] and not options["load_module_only"])
