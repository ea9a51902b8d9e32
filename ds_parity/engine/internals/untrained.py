"""A loop that calls `loss.backward()` and nothing of the engine but forwards: no other check ever runs there.

accelerate's `optimizer.step()` does nothing with DeepSpeed, so that a loop which has left out `accelerator.backward`
trains nothing, without an error. On ZeRO 0 DeepSpeed raises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter

_LOG = logging.getLogger("ds_parity")
_RUN: Final = [0]
"""How many backwards the engines of this process have run: one may bring gradients to the model of another."""
_ROUNDS: Final = 3
"""So many backwards, each with a forward behind it: one may be a look at the gradients, before training begins."""


class Untrained:
    """Warns once of a loop whose backwards never come to the engine.

    Args:
        adapter: counts the gradients that come in.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._seen = self._rounds = self._run = 0

    def after_backward(self) -> None:
        """Note that a backward of the engine has run."""
        _RUN[0] += 1

    def before_forward(self) -> None:
        """Warn where gradients have come in between the last forwards, and no backward of an engine has run."""
        came_in = self._adapter.gradients_in
        if self._run != _RUN[0]:
            self._run, self._seen, self._rounds = _RUN[0], came_in, 0
        if came_in == self._seen or not torch.is_grad_enabled():
            return
        self._seen = came_in
        self._rounds += 1
        if self._rounds == _ROUNDS:
            _LOG.warning(
                "%d backwards have brought gradients to the model's parameters, and none of them was "
                "engine.backward(): they are in no window, and train nothing. Call engine.backward(loss), or "
                "accelerate's accelerator.backward(loss), in place of loss.backward(), and build the engine anew, "
                "because these gradients stay in DeepSpeed's buckets",
                _ROUNDS,
            )
