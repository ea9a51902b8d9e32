"""What a loop changes between the windows of a pipeline: gradients, and what is trained.

DeepSpeed's `train_batch()` takes whatever has accumulated before it into the step, and never trains what it did not
find when the engine was built; neither shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ds_parity.engine.internals.kept import note_gradients
from ds_parity.engine.internals.newcomers import names_of
from ds_parity.engine.internals.stepped import guard_optimizers
from ds_parity.errors import WindowError

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter
    from ds_parity.engine.internals.surface import Parameter


class BetweenWindows:
    """Watches over a stage of a pipeline between its windows.

    Args:
        adapter: of the stage's optimizer.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._trained: list[Parameter] = [p for group in adapter.groups() for p in group]
        # Held, so that none that comes later is given the id of one that went: what an optimizer was not given rests.
        self._at_start = {id(p): (p, p.requires_grad) for p in adapter.engine.module.parameters()}
        self._inside, self._stray, self._failed, self._ended = False, False, "", False
        adapter.engine.zero_grad()  # what a model has accumulated before it came here belongs to no window
        self._left = self._gradients()
        note_gradients(self._trained, self._note)
        guard_optimizers(self, adapter.engine)

    def keeps_steps(self, *, always: bool) -> bool:
        """Whether nobody but the engine may step the optimizer now.

        Args:
            always: also between windows.
        """
        return always and not (self._inside or self._ended)

    def end(self) -> None:
        """Guard nothing any more: the engine is destroyed."""
        self._ended = True

    def refuse_failed(self, doing: str) -> None:
        """Raise WindowError where a window has raised: DeepSpeed keeps what had run of it.

        Args:
            doing: what the loop has called, for the message.
        """
        if self._failed:
            raise WindowError(
                f"{doing} of a pipeline whose train_window() has raised inside DeepSpeed's train_batch() "
                f"({self._failed}): gradients and messages of that window are there in part, and no load takes them "
                "out; build a new engine, and load a checkpoint into it"
            )

    def refuse(self, window: int) -> None:
        """Raise WindowError where a loop has changed what the next window would not train, or train wrong.

        Args:
            window: index of the coming window, for the message.
        """
        self.refuse_failed("train_window()")
        if self._ended:
            raise WindowError(
                "the engine was destroyed (engine.destroy()), and takes no more train_window(); build a new engine, "
                "and load a checkpoint into it"
            )
        if not torch.is_grad_enabled():
            raise WindowError(
                f"train_window() in window {window} under torch.no_grad() or inference_mode(): nothing could be "
                "trained; call it outside"
            )
        self._refuse_strays(window)
        own = {id(p) for group in self._adapter.groups() for p in group}
        trained = [(name, p) for name, p in self._adapter.engine.module.named_parameters() if p.requires_grad]
        lost = [one for one in trained if id(one[1]) not in own and not self._rested(one[1])]
        if lost:
            raise WindowError(
                f"{names_of(lost)}: trained now, but no group of the optimizer holds it, because it was frozen, or not "
                "in the model, when the engine was built: it would never be trained; build the engine with all that "
                "will ever be trained, and freeze it after that, or build a new engine"
            )
        if not trained:
            raise WindowError(
                f"this stage trains nothing in window {window}: all its parameters were frozen after the engine was "
                "built, and DeepSpeed's backward raises there; leave one trained, with the lr of its group 0"
            )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let what runs inside change gradients: it is a window."""
        self._inside = True
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._inside = False
            self._left = self._gradients()

    def _rested(self, parameter: Parameter) -> bool:
        return self._at_start.get(id(parameter), (None, False))[1]

    def _note(self, _: int) -> None:
        self._stray = self._stray or not self._inside

    def _gradients(self) -> list[tuple[int, int] | None]:
        return [None if p.grad is None else (id(p.grad), p.grad._version) for p in self._trained]

    def _refuse_strays(self, window: int) -> None:
        if not self._stray and self._gradients() == self._left:
            return
        # On stage 0 there is nothing but these; ZeRO 1 has buckets, and low precision copies.
        plain = isinstance(self._adapter.engine.optimizer, torch.optim.Optimizer)
        if (plain or not self._stray) and not any(p.grad is not None and bool(p.grad.any()) for p in self._trained):
            self._stray, self._left = False, self._gradients()
            return
        raise WindowError(
            f"gradients were changed outside of train_window() before window {window}: they would enter its step "
            "without a division by the window's total. Causes: loss.backward() beside the engine; gradients that are "
            "written by hand. Give every loss to the pipeline's loss_fn. "
            + ("Clear them (engine.zero_grad())" if plain else "Build a new engine, and load a checkpoint into it")
        )
