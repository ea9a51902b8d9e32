"""How DeepSpeed refuses a checkpoint, what it leaves to the caller of its save, and which weights it loads alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from deepspeed.runtime import engine as of_deepspeed
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine

REFUSALS: tuple[type[Exception], ...] = (ZeRORuntimeException, AssertionError)
"""A checkpoint of another number of ranks: a rank that finds no file of its own raises a bare assertion."""

_COLLECT: Final = "get_fp32_state_dict_from_zero_checkpoint"


@contextmanager
def weights_of(tag: Any, engine: Engine) -> Iterator[None]:
    """Return a context in which an engine on ZeRO 3 that loads weights alone loads those of a tag.

    DeepSpeed collects those of `latest`, whatever tag it was given (runtime/engine.py, _load_checkpoint, in every
    release from 0.16.9 to 0.19.8).

    Args:
        tag: of the checkpoint; None for `latest`.
        engine: a bare DeepSpeed engine.
    """
    # Of a universal checkpoint DeepSpeed takes the weights from other files.
    if tag is None or engine.zero_optimization_stage() != 3 or engine.load_universal_checkpoint():
        yield
        return

    def tagged(collect: Callable[..., Any]) -> Callable[..., Any]:
        def collected(folder: str, given: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("tag", given)
            return collect(folder, str(tag) if given is None else given, *args, **kwargs)

        return collected

    with wrapped(of_deepspeed, _COLLECT, tagged):
        yield
