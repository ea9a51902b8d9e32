"""A few values of each gradient: writes through `p.grad.data` and NumPy are not among those that torch counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter

_OF_EACH = 16
# Devices on which a comparison is read at once, because nothing runs there beside the loop.
_AT_ONCE = ("cpu",)


class Samples:
    """Compares the first values of gradients with those that the last backward has left.

    What is meant to change a gradient as a whole (the zeroing and the clipping of a loop's own, noise) changes some of
    them. A mask that spares the first values of each gradient passes, and is right: it commutes with all that follows.

    Args:
        adapter: knows the gradients.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._places: list[tuple[int, int]] = []
        self._views: list[torch.Tensor] = []
        self._noted: torch.Tensor | None = None
        self._differ: torch.Tensor | None = None

    def note(self) -> None:
        """Keep the values as they are now; what differed before has been told or will be."""
        self._noted = self._taken()

    def forget(self) -> None:
        """Keep nothing: the window is over, and its gradients are to be freed."""
        self._places, self._views, self._noted, self._differ = [], [], None, None

    def differ(self, *, ends: bool) -> bool:
        """Return whether a value is another one than was noted.

        An accelerator is not waited for inside a window: what differed there is told at its end.

        Args:
            ends: the window is about to end.
        """
        noted = self._noted
        if noted is None:
            return False
        taken = self._taken()
        if taken is None or (taken.shape, taken.device) != (noted.shape, noted.device):
            return True
        # They are bits: a NaN that is still there is the same.
        if taken.device.type in _AT_ONCE:
            return not torch.equal(taken, noted)
        here = (taken != noted).any()
        self._differ = here if self._differ is None else self._differ | here
        return ends and bool(self._differ)

    @torch.no_grad()
    def _taken(self) -> torch.Tensor | None:
        found = self._adapter.dense_gradients()
        # A model may lie on several devices.
        found = [g for g in found if g.device == found[0].device]
        places = [(g.data_ptr(), g.numel()) for g in found]
        if places != self._places:
            self._places, self._views = places, [_first(g) for g in found]
        return torch.cat(self._views).view(torch.uint8) if self._views else None


def _first(gradient: torch.Tensor) -> torch.Tensor:
    """Return the first values, of shape (<= 16,), which share the gradient's memory."""
    kept = gradient.detach()
    flat = kept.view(-1) if kept.is_contiguous() else kept[(0,) * (kept.dim() - 1)]
    return flat[:_OF_EACH]
