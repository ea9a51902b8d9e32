"""Checkpoints of bf16 on ZeRO 0 in DeepSpeed before 0.18.6, which lack the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ds_parity.engine.internals.guards import ENGINE, source
from ds_parity.engine.internals.older_surface import OlderEngine, OlderHalf
from ds_parity.engine.internals.replaced import replaced
from ds_parity.errors import CheckpointError

_TAKEN_FOR_ZERO: Final = "zero_optimizer_state = self.zero_optimization() or self.bfloat16_enabled()"


def keep_state(engine: OlderEngine, optimizer: OlderHalf) -> None:
    """Have checkpoints of an engine in bf16 on ZeRO 0 hold, and load, the state of its optimizer.

    DeepSpeed takes them for checkpoints of ZeRO, whose optimizer has files of its own, and writes none
    (tools/deepspeed_faults/checkpoint_bf16_zero0.py): the step after loading would undo what was loaded.

    Args:
        engine: a bare DeepSpeed engine in bf16 on ZeRO 0.
        optimizer: its wrapper.
    """
    if _TAKEN_FOR_ZERO not in source(ENGINE, "_save_checkpoint"):
        return
    save, load = engine._save_checkpoint, engine._load_checkpoint
    load_state: Callable[..., Any] = optimizer.load_state_dict

    def save_whole(*args: Any, **kwargs: Any) -> Any:
        with replaced(engine, "bfloat16_enabled", _no):
            return save(*args, **kwargs)

    def load_whole(*args: Any, **kwargs: Any) -> Any:
        with replaced(engine, "bfloat16_enabled", _no):
            return load(*args, **kwargs)

    def load_what_is_there(state: Any, *args: Any, **kwargs: Any) -> Any:
        if state is None:
            raise CheckpointError(
                "load_checkpoint() found no state of the optimizer: DeepSpeed before 0.18.6 writes none in bf16 on "
                "ZeRO 0. Load with load_module_only=True, or load_optimizer_states=False"
            )
        return load_state(state, *args, **kwargs)

    engine._save_checkpoint = save_whole
    engine._load_checkpoint = load_whole
    optimizer.load_state_dict = load_what_is_there


def _no() -> bool:
    return False
