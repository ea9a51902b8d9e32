"""What a loop still owes between two of its calls, and whether its window can go on at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ds_parity.engine.half_loaded import refuse_half_loaded
from ds_parity.engine.internals.base import Adapter
from ds_parity.errors import WindowError
from ds_parity.window import Ledger

PARTLY_THERE: Final = (
    "a backward() that was counted and then raised, so that its gradient may be there in part or not at all"
)
PARTLY_DONE: Final = "a step() or finish() that raised, so that its update may be done in part or not at all"
ENDED_APART: Final = (
    "a step() or finish() in which ranks did not come together, so that another one may end it where this ends its next"
)
OF_PLANS: Final = "micro-batches of different plans on its ranks"


class PassState:
    """Where the open window stands between two calls.

    Args:
        adapter: of the engine's optimizer wrapper.
        ledger: the engine's windows.

    Attributes:
        awaits_step: a backward() has run whose step() has not.
        lost: why the open window can't go on, because something in it has raised; "" where it can.
        ran_in: index of the window that this rank's last backward belonged to; None before the first.
        half_loaded: the folder of a load that has raised and ended half way; None where none has.
    """

    half_loaded: str | None = None  # outlives the window, which a load throws away

    def __init__(self, adapter: Adapter, ledger: Ledger) -> None:
        self._adapter = adapter
        self._ledger = ledger
        self.reset()

    def reset(self) -> None:
        """Owe nothing: the open window was thrown away, or there was none yet."""
        self.awaits_step = False
        self.lost = ""
        self.ran_in: int | None = None

    def ran_backward(self) -> None:
        """Take note that the backward of the pass has run to its end."""
        self.ran_in, self.lost = self._ledger.window.index, ""

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Take note of what is raised inside, where a window ends."""
        try:
            yield
        except BaseException:
            # What of the step was done is not known, unless its window is settled: a second one would follow it.
            self.lost = PARTLY_DONE if self._ledger.window.closed else self.lost
            raise

    def refuse_lost(self) -> None:
        """Raise WindowError where something in the open window has raised, and CheckpointError where a load has."""
        refuse_half_loaded(self.half_loaded, f"window {self._ledger.window.index}")
        if self.lost:
            anew = "" if self._adapter.clears_strays else " (into a new engine, if it was the backward that raised)"
            raise WindowError(
                f"window {self._ledger.window.index} has {self.lost}: load a checkpoint, which throws the window away"
                f"{anew}"
            )

    def refuse_owed_step(self) -> None:
        """Raise WindowError where no backward may come: the one before waits for its step(), or its window is lost."""
        self.refuse_lost()
        if self.awaits_step:
            raise WindowError(
                f"backward() in window {self._ledger.window.index} while the pass before it waits for its step(): one "
                'step() ends one pass; call it after every backward(), or write "boundary": "caller" in ds_parity if '
                "one step() ends a window of several backwards"
            )

    def refuse_step_alone(self) -> None:
        """Raise WindowError where no backward has run since the last `step()`."""
        if not self.awaits_step:
            raise WindowError(
                f"step() in window {self._ledger.window.index} without a backward() before it: one step() ends one "
                "pass; call it once after every backward()"
            )
