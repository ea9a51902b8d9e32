"""Half precision where DeepSpeed says no, and what it forgets to clear: for experiments only, never for training.

DeepSpeed's CPU accelerator answers `is_fp16_supported()` by whether the processor multiplies fp16 matrices by itself;
torch computes them all the same, only slower. CUDA answers yes, and nothing is changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

try:
    from deepspeed.runtime import torch_autocast
except ImportError:  # up to 0.16 DeepSpeed has none, and there is nothing to forget
    torch_autocast = None

_EMULATED = ", fp16 computed by torch although DeepSpeed says that this processor can't"


@contextmanager
def experiment() -> Iterator[None]:
    """Inside, an engine of any precision is built and run as in a process of its own."""
    forget_autocast()
    forget_hpz()
    with fp16_allowed():
        yield


def accelerator(dtype: str) -> str:
    """Return what an engine of a type runs on, and, where it does so by `fp16_allowed` alone, that it does."""
    known = get_accelerator()
    return str(known.device_name()) + (_EMULATED if dtype == "fp16" and not known.is_fp16_supported() else "")


@contextmanager
def fp16_allowed() -> Iterator[None]:
    """Let DeepSpeed build and run fp16 engines inside, whatever its accelerator says.

    DeepSpeed asks while an engine is built (engine.py, `_do_sanity_check`, 0.19.8), and in every reduction on ZeRO 0
    (`supported_dtypes()` in `split_half_float_double_sparse`), so engines must be run inside too.
    """
    accelerator = get_accelerator()
    denied = not accelerator.is_fp16_supported()
    if denied:
        accelerator.is_fp16_supported = lambda: True  # on the one accelerator object, in front of its class's answer
    try:
        yield
    finally:
        if denied:
            del accelerator.is_fp16_supported


def forget_hpz() -> None:
    """Undo what an engine with `zero_hpz_partition_size` leaves behind in its process (utils/groups.py, 0.19.8).

    A later `zero.Init` with that option raises because the group is there, and a later engine without it gets the group
    all the same (engine.py, _configure_zero_optimizer).
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def forget_autocast() -> None:
    """Undo what a `torch_autocast` engine leaves behind in its process (runtime/torch_autocast.py, 0.19.8).

    The first such engine sets two module globals, and nothing clears them: every later ZeRO engine would take them for
    its own setting, and scale its losses after an fp16 one. Call this before each engine where many share a process.
    """
    if torch_autocast is not None:
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        torch_autocast.TORCH_AUTOCAST_DTYPE = None
