"""What would tell more than the record does: one command, as a rule."""

from __future__ import annotations

from collections.abc import Iterable

from ds_parity.parity.diagnosis.view import View

_PROBE = (
    "`ds-parity probe CONFIG --subject your_module:loop` shows with which coefficient each micro-batch entered a step"
)
_REWRITE = (
    "`ds-parity rewrite CONFIG` shows the optimizer, clipping and scheduler that DeepSpeed receives, for each run"
)
_VERIFY = "`ds-parity verify CONFIG --train your_module:train --windows 1` runs your loss on known micro-batches"
_COUNTS = "record rollouts and tokens in both runs (`--map tokens=...`), and run `ds-parity compare` again"
_WEIGHTS = "record weights in both runs, as `ds-parity verify` does, and run `ds-parity compare` again"
_LOGS = "read how each run computes and writes the fields that differ: the updates were the same"


def recording(names: Iterable[str]) -> str:
    """Return what to do where nothing differs but that one side alone has values of some fields."""
    return f"record {', '.join(names)} in both runs, and run `ds-parity compare` again"


def telling(view: View, classes: tuple[str, ...]) -> str:
    """Return the command that halves the classes that are left open, or where to look if one is left."""
    if "logging" in classes and not view.recorded("weights"):
        return _WEIGHTS
    if view.trained_alike:
        return _LOGS
    if "data" in classes:
        return _VERIFY if view.recorded("rollouts") or view.recorded("tokens") else _COUNTS
    return _PROBE if "gradient" in classes else _REWRITE
