"""`trainer_state.json` of transformers: what its Trainer has logged, beside every checkpoint."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_parity.errors import TraceError
from ds_parity.trace.foreign.lines import json_rows
from ds_parity.trace.foreign.source import Source, SourceRow


def trainer_state(path: Path, state: dict[str, Any]) -> Source:
    """The steps of `log_history`: entries with a `loss`; those of evaluations and the summary have none.

    A loss there is the mean over the steps since the one logged before; release 4.51 rounds it to 4 decimals, 5.23
    doesn't. The LR is the one that the step was taken with.

    Args:
        path: of the file.
        state: what it holds, its numbers as text.

    Raises:
        TraceError: `log_history` is no list, or holds no entry with a loss.
    """
    history = state["log_history"]
    if not isinstance(history, list):
        raise TraceError(f"{path}: log_history is {history!r:.60}: it must be a list of what was logged")
    if not any(isinstance(entry, dict) and "loss" in entry for entry in history):
        raise TraceError(f"{path}: none of the {len(history)} entries of log_history has a loss: no step was logged")
    every = state.get("logging_steps")
    return Source(
        path,
        "transformers",
        partial(_steps, path, history),
        step="step",
        mean_loss=True,
        every=int(every) if isinstance(every, str) and every.isdecimal() and int(every) else None,
    )


def _steps(path: Path, history: list[Any]) -> Iterator[SourceRow]:
    for row in json_rows(path, "log_history", history, "entry"):
        if "loss" in row.cells or "loss" in row.unread:
            yield row
