"""What the wrappers of ZeRO 1 to 3 have in common: the correction rides on the unscale that `step()` does anyway."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.kept import note_gradients
from ds_parity.engine.internals.surface import GradScaler, ZeroOptimizer


class Zero(Adapter):
    """`step()` divides gradients by the loss scale, before it takes their norm and clips them."""

    _came_before = 0  # of these, before the open window
    # Parameters, a bit each: of the backward that runs, of the last one, and of all of the window so far.
    _pass = _last = _used = 0
    _arrived = _last_arrived = 0  # what makes a difference of the order of gradients: in this backward, in the last one
    _sequence = 0  # a checksum of the window's backwards, one by one
    _together = 0  # parameters whose gradients DeepSpeed reduces together, whichever of them a pass uses: not counted

    def prepare(self) -> None:
        """Count the gradients that come in: they are reduced at once, and nothing else is left of them."""
        super().prepare()
        note_gradients(self._trained, self._note)

    def _note(self, number: int) -> None:
        # DeepSpeed's own count starts again with every forward.
        self._came_in += 1
        self._pass |= 1 << number

    def complete(self) -> None:
        """Deliver what was not."""
        self.deliver()

    def _renew_norm(self, number: int, written: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the norm of what a loop has written into an offloaded gradient.

        Only behind the boundary's pass is that for the step. Before, this pass, or `complete`, replaces it.
        """
        norms = self._zero.norm_for_param_grads
        if number in norms or self.engine.is_gradient_accumulation_boundary():
            norms[number] = torch.linalg.vector_norm(written, dtype=dtype)

    def _note_order(self, number: int) -> None:
        """Note that a gradient is the next to come, where that matters."""
        # DeepSpeed waits for the last of the parts of a tiled computation, of which ranks may have other numbers.
        if getattr(self._trained[number], "ds_grad_is_ready", True):
            # In fixed width: 256 must not look like 0 and 1.
            self._arrived = zlib.crc32(number.to_bytes(4, "little"), self._arrived)

    def begin_window(self) -> None:
        """Forget what the last window used."""
        self._used = self._sequence = self._last_arrived = 0
        self._came_before = self._came_in

    @property
    def _zero(self) -> ZeroOptimizer:
        optimizer: ZeroOptimizer = self.engine.optimizer
        return optimizer

    def end_backward(self) -> None:
        """Add what the backward used to what the window did; clear what DeepSpeed clears in `engine.forward` alone.

        ZeRO 3 copies gradients over those of the passes before until this ran after them, and a loop may call
        `engine.module`, or run several forwards before their backwards (tools/deepspeed_faults/
        forward_past_the_engine.py).
        """
        self._zero.clear_backward_seen_flag()
        self._last, self._pass = self._pass & ~self._together, 0
        self._last_arrived, self._arrived = self._arrived, 0
        self._used |= self._last
        self._sequence = checksum(self._last, checksum(self._last_arrived, self._sequence))

    def used_parameters(self) -> int:
        """Return a checksum of what the window used: pass by pass, or of all together where it is reduced once.

        Gradients are reduced in buckets, in their order: where ranks use other parameters, gradients of different
        parameters are added up (tools/deepspeed_faults/ranks_use_other_parameters.py).
        """
        return (self._checksum_of_one_reduction() if self._reduced_once else self._sequence) & 0xFFFFFF

    def _checksum_of_one_reduction(self) -> int:
        return checksum(self._used)

    @property
    @abstractmethod
    def _reduced_once(self) -> bool:
        """Whether the gradients of all backwards of the window are reduced together."""

    def gradients_seen(self) -> object:
        """Return how many gradients have come in, and what is there where they are kept until they are reduced."""
        if self.keeps_whole_gradients:
            return self._came_in, super().gradients_seen()
        return self._came_in

    @property
    def clears_strays(self) -> bool:
        """Whether `discard` takes a stray gradient away: ZeRO keeps what came in, in buckets, until they are full."""
        return False

    def holds_gradients(self) -> bool:
        """Whether gradients came in since the last window: those of a stray backward enter the step.

        A window without weight may leave zeros, which a loop may clear.
        """
        return self._came_in != self._came_before or super().holds_gradients()

    @contextmanager
    def corrected(self, expected: float, total: float) -> Iterator[None]:
        """Divide by another loss scale in this step; it is given from outside, so a dynamic scaler never sees it."""
        optimizer, scaler = self._zero, self.grad_scaler()
        before = optimizer.custom_loss_scaler, optimizer.external_loss_scale
        # Read before it is replaced: in fp16 the losses of this window were multiplied by it.
        scale = optimizer.loss_scale if scaler is None else scaler.get_scale()
        optimizer.custom_loss_scaler, optimizer.external_loss_scale = True, scale * total / expected
        # Without the GradScaler ZeRO unscales by its scale itself, before it clips, on all ranks and groups alike
        # (tools/deepspeed_faults/autocast_fp16_clipping.py and autocast_fp16_groups.py).
        optimizer.torch_autocast_gradscaler = None
        try:
            yield
        finally:
            optimizer.custom_loss_scaler, optimizer.external_loss_scale = before
            optimizer.torch_autocast_gradscaler = scaler
        if scaler is not None:
            _report_overflow(scaler, optimizer.overflow, self.engine.device)


def _report_overflow(scaler: GradScaler, overflow: bool, device: torch.device | str) -> None:
    # A GradScaler learns of an overflow from gradients alone, so it is shown one; DeepSpeed never reports it, and the
    # scale would never come down (tools/deepspeed_faults/autocast_fp16_overflow.py).
    shown = torch.zeros(1, device=device, requires_grad=True)
    shown.grad = torch.full_like(shown, float("inf") if overflow else 0.0)
    scaler.unscale_(torch.optim.SGD([shown], lr=0.0))
    scaler.update()


def checksum(used: int, before: int = 0) -> int:
    """Return 32 bits of a set of parameters, a bit each, behind those of the sets before it.

    Python's own `hash` of a number is the number modulo 2**61 - 1: parameter n and n + 61 would be the same.
    """
    return zlib.crc32(used.to_bytes(used.bit_length() // 8 + 1, "little"), before)
