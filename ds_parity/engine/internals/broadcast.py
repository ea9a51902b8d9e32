"""Lets DeepSpeed send the weights of the first rank to the others, whatever the shape of a parameter.

0.19.8 sends each of them as bytes (runtime/engine.py, and zero/partition_parameters.py on ZeRO 3), which torch refuses
for a number without a dimension (a learned temperature or scale) and for a last dimension that is not contiguous
(`channels_last`, a transposed or expanded weight): "self.dim() cannot be 0 to view Float as Byte"
(tools/deepspeed_faults/odd_shapes.py). Older releases send all but an expanded weight, whose elements share memory.
On ZeRO 3 it does the same where weights were gathered to be loaded or saved (GatheredParameters of
zero/partition_parameters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.unread import is_unsure

_HERE: Final = "broadcast.py"
_BROADCAST: Final = "_broadcast_model"
_CONVERT: Final = "_convert_to_deepspeed_param"


@contextmanager
def any_shape_is_sent() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an engine over parameters of any shape and layout.

    A release that sends weights in another way, which nobody has read, is left as it is.
    """
    if is_unsure(_HERE):
        yield
        return
    with wrapped(DeepSpeedEngine, _BROADCAST, _in_a_row), wrapped(Init, _CONVERT, _then_in_a_row):
        yield


@contextmanager
def any_shape_is_gathered() -> Iterator[None]:
    """Return a context in which DeepSpeed may gather parameters without a dimension for one rank to change them."""
    if is_unsure(_HERE):
        yield
        return
    with wrapped(GatheredParameters, "__exit__", _given_out_in_a_row):
        yield


def _given_out_in_a_row(end: Callable[..., None]) -> Callable[..., None]:
    def ended(self: GatheredParameters, *exception: Any) -> None:
        given_out = self.params if self.enabled and self.src_rank is not None else ()
        numbers = [one for one in given_out if one.data.dim() == 0]
        try:
            for one in numbers:
                one.data = _row(one.data)
            end(self, *exception)
        finally:
            # Gathered by another context around this one, it stays whole.
            for one in numbers:
                if one.data.numel():
                    one.data = one.data.view(())

    return ended


def _in_a_row(send: Callable[[DeepSpeedEngine], None]) -> Callable[[DeepSpeedEngine], None]:
    def sent(self: DeepSpeedEngine) -> None:
        # Parameters of ZeRO 3 are sent, and partitioned, one by one.
        own = [one for one in self.module.parameters() if not hasattr(one, "ds_id") and _is_odd(one.data)]
        odd = [(one, one.data) for one in own]
        try:
            for one in own:
                one.data = _row(one.data)
            send(self)
            odd = [(one, _laid_out_as(data, one.data.view(data.shape))) for one, data in odd]
        finally:
            for one, data in odd:
                one.data = data

    return sent


def _then_in_a_row(convert: Callable[..., None]) -> Callable[..., None]:
    # It notes the parameter's shape, with which the partition is gathered again; what follows takes it in a row.
    def converted(self: Init, param: Any, *args: Any, **kwargs: Any) -> None:
        convert(self, param, *args, **kwargs)
        if _is_odd(param.data):
            param.data = _row(param.data)

    return converted


def _row(data: torch.Tensor) -> torch.Tensor:
    row = data.contiguous().view(-1)
    # A single element keeps whatever stride it has.
    return row if row.stride(0) == 1 else row.new_empty(row.shape).copy_(row)


def _laid_out_as(data: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    # Elements that share memory (expand()) can't be written one by one, nor trained: these become what was sent.
    if any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride(), strict=True)):
        return sent
    # What is contiguous for torch was sent from where it lies, and copying within one memory is refused.
    return data if sent.data_ptr() == data.data_ptr() else data.copy_(sent)


def _is_odd(data: torch.Tensor) -> bool:
    # Of a dimension of size 1 torch asks no stride where it calls a tensor contiguous: a convolution of 1 x 1 in
    # channels_last is contiguous, and its last stride is not 1.
    return data.dim() == 0 or not data.is_contiguous() or data.stride(-1) != 1
