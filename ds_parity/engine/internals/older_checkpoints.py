"""Checkpoints of bf16 on ZeRO 0 in DeepSpeed before 0.18.5, which lack the optimizer's state."""

from __future__ import annotations

from typing import Any, Final, cast

from ds_parity.engine.internals.guards import ENGINE, source
from ds_parity.engine.internals.older_surface import OlderEngine
from ds_parity.engine.internals.replaced import replaced
from ds_parity.engine.internals.surface import Engine

_TAKEN_FOR_ZERO: Final = "zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()"


def keep_state(engine: OlderEngine) -> None:
    """Have checkpoints of an engine in bf16 on ZeRO 0 contain, and load, the state of its optimizer.

    DeepSpeed takes them for checkpoints of ZeRO, whose optimizer has files of its own, and writes none
    (tools/deepspeed_faults/checkpoint_bf16_zero0.py): the step after loading would undo what was loaded.

    Args:
        engine: a bare DeepSpeed engine in bf16 on ZeRO 0.
    """
    if _TAKEN_FOR_ZERO not in source(ENGINE, "_save_checkpoint"):
        return
    save, load = engine._save_checkpoint, engine._load_checkpoint

    def save_whole(*args: Any, **kwargs: Any) -> Any:
        with replaced(engine, "bfloat16_enabled", lambda: False):
            return save(*args, **kwargs)

    def load_whole(*args: Any, **kwargs: Any) -> Any:
        # It is asked first whether ZeRO has the state, and then whether the state is one of low precision.
        answers = iter((False,))
        with replaced(engine, "bfloat16_enabled", lambda: next(answers, True)):
            return load(*args, **kwargs)

    engine._save_checkpoint = save_whole
    engine._load_checkpoint = load_whole


def forget_sparse_names(engine: Engine) -> None:
    """Have no gradient reduced by its rows because a checkpoint's were: rows that add up to 0 would be lost.

    tools/deepspeed_faults/sparse_gradients_zero0.py shows it. Since 0.19.8 no gradient is.

    Args:
        engine: a bare DeepSpeed engine that has loaded a checkpoint.
    """
    if getattr(engine, "sparse_tensor_module_names", None):
        cast("OlderEngine", engine).sparse_tensor_module_names = set()
