"""Checkpoints with sequence parallelism, whose ranks DeepSpeed takes for tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from deepspeed.runtime import engine as of_deepspeed

from ds_parity.engine.internals.replaced import replaced, wrapped
from ds_parity.engine.internals.surface import Engine

_METADATA: Final = "_checkpoint_parallel_metadata"


@contextmanager
def whole_on_each_rank(engine: Engine) -> Iterator[None]:
    """Return a context in which ranks that only split sequences save and load checkpoints as those of whole weights.

    parallel_state_sp gives its groups under the names of model parallelism, too. DeepSpeed 0.19.8 then writes so many
    tensor-parallel ranks into a checkpoint, of which it saves one: ZeRO 1 and 2 can't be converted
    (_checkpoint_parallel_metadata of runtime/engine.py; get_model_3d_descriptor of checkpoint/reshape_3d_utils.py).
    Where they load what was converted, they look for each rank's part of a parameter by the same mpu
    (load_hp_checkpoint_state_from_checkpoint_dir of runtime/base_optimizer.py).

    Args:
        engine: a bare DeepSpeed engine.
    """
    with ExitStack() as stack:
        if _splits_sequences_alone(engine):
            stack.enter_context(wrapped(of_deepspeed, _METADATA, _of_no_mpu))
            if hasattr(engine.optimizer, "mpu"):
                stack.enter_context(replaced(engine.optimizer, "mpu", None))
        yield


def _splits_sequences_alone(engine: Engine) -> bool:
    # AutoTP has an mpu, too, and no group of a sequence.
    if engine.sequence_parallel_size == 1:
        return False
    model_parallel = getattr(engine.mpu, "get_model_parallel_group", lambda: None)()
    return model_parallel is not None and model_parallel is engine.seq_parallel_group


def _of_no_mpu(described: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda _: described(None)
