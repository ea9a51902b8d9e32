"""A few values of each gradient: writes through `p.grad.data` and NumPy are not among those that torch counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter

# From each end of a gradient.
_OF_EACH = 8
# Devices on which a comparison is read at once, because nothing runs there beside the loop.
_AT_ONCE = ("cpu",)


class Samples:
    """Compares the first and last values of gradients with those that the last backward has left.

    What changes a gradient as a whole (the zeroing and the clipping of a loop's own, noise) changes some of them. A
    mask that spares both ends of every gradient is not noticed.

    Args:
        adapter: knows the gradients.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._noted: torch.Tensor | None = None
        self._differed: torch.Tensor | None = None

    def note(self) -> None:
        """Keep the values as they are now; that some differed before is still told when the window ends."""
        self._noted = self._taken()

    def forget(self) -> None:
        """Keep nothing: the window is over."""
        self._noted = self._differed = None

    def differ(self, *, ends: bool) -> bool:
        """Return whether a value is another one than was noted.

        An accelerator is not waited for inside a window: what differed there is told at its end.

        Args:
            ends: the window is about to end.
        """
        found = self._found(ends=ends)
        if ends and not found:
            # The step, whose memory is at its peak, has no use for them.
            self.forget()
        return found

    def _found(self, *, ends: bool) -> bool:
        # On ZeRO 1 nothing is left to be noted behind the boundary's backward.
        if self._noted is not None:
            taken, noted = self._taken(), self._noted
            if taken is None or (taken.shape, taken.device) != (noted.shape, noted.device):
                return True
            # They are bits: a NaN that is still there is the same.
            if taken.device.type in _AT_ONCE:
                return not torch.equal(taken, noted)
            here = (taken != noted).any()
            self._differed = here if self._differed is None else self._differed | here
        return ends and self._differed is not None and bool(self._differed)

    @torch.no_grad()
    def _taken(self) -> torch.Tensor | None:
        found = self._adapter.dense_gradients()
        # A model may lie on several devices. No view is kept: DeepSpeed frees gradients while it reduces them.
        ends = [end for g in found if g.device == found[0].device for end in _ends(g)]
        return torch.cat(ends).view(torch.uint8) if ends else None


def _ends(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last values, each of shape (<= 8,)."""
    own = gradient.detach()
    if own.is_contiguous():
        flat = own.view(-1)
        return flat[:_OF_EACH], flat[-_OF_EACH:]
    rows = own.dim() - 1
    return own[(0,) * rows][:_OF_EACH], own[(-1,) * rows][-_OF_EACH:]
