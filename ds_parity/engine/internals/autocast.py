"""Keeps `torch_autocast` to the engines that ask for it: DeepSpeed has it in two globals, for all of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.internals.unread import is_unsure

try:
    from deepspeed.runtime import torch_autocast
except ImportError:  # DeepSpeed before 0.17.6 has none
    torch_autocast = None

_HERE: Final = "autocast.py"


@contextmanager
def own_autocast() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an engine, by this engine's `torch_autocast` alone.

    ZeRO 1 to 3 ask the globals (runtime/torch_autocast.py, 0.19.8), which nothing clears. So an engine that was built
    behind one with `torch_autocast` in float16 had a GradScaler, too, and in fp16 two loss scales, one times the other:
    gradients overflowed, and their steps were skipped (tools/deepspeed_faults/autocast_outlives_its_engine.py).
    """
    if torch_autocast is None or is_unsure(_HERE):
        yield
        return
    before = torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    try:
        yield
    finally:
        # An engine of DeepSpeed's own asks them when it is built, and in each backward; ours no more.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = before


def keep_comm_dtype(engine: Engine) -> None:
    """Let an engine of ZeRO 1 to 3 reduce each gradient in the dtype for which it was built.

    In each backward DeepSpeed asks the globals for it, and engines that were built since have set them
    (runtime/base_optimizer.py, get_param_comm_dtype, 0.19.8). What an engine with `torch_autocast` wrote on the
    parameters of a model is taken off them, where another engine is built over them: ZeRO 3 would gather by it.

    Args:
        engine: that DeepSpeed has just built, of any stage, inside `own_autocast`.
    """
    # Others of DeepSpeed's wrappers have the method of the class that they share, and never ask it.
    reduces = isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3))
    if torch_autocast is None or is_unsure(_HERE) or not reduces:
        return
    if engine.torch_autocast_enabled():
        engine.optimizer.get_param_comm_dtype = torch_autocast.get_comm_dtype
        return
    dtype = engine.optimizer.communication_data_type
    engine.optimizer.get_param_comm_dtype = lambda _: dtype
    for parameter in engine.module.parameters():
        vars(parameter).pop(torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME, None)
