"""Says what DeepSpeed's assertions mean where one backward brings the gradient of a parameter twice."""

from __future__ import annotations

from types import TracebackType

from ds_parity.errors import WindowError

# ZeRO 1 with overlap_comm and ZeRO 2 say it (stage_1_and_2.py); ZeRO 3 asserts, without a word, that no bucket contains
# a parameter twice, or asks a gradient that it has just reduced for its size (stage3.py, both functions).
_PARTITIONED = 3
_SAID, _SILENT_IN = "already been reduced", ("__reduce_and_partition_ipg_grads", "__add_grad_to_ipg_bucket")


def explain(error: Exception, stage: int) -> None:
    """Raise WindowError where a backward has raised because it brought a gradient twice.

    Args:
        error: that the backward has raised.
        stage: of ZeRO.
    """
    if _SAID not in str(error) and _innermost(error.__traceback__) not in _SILENT_IN:
        return
    smaller = ", or, where other parameters lie between its uses, zero_optimization.reduce_bucket_size below their size"
    raise WindowError(
        f"one backward() brought the gradient of a parameter twice, and DeepSpeed's ZeRO stage {stage} has reduced, or "
        f"kept, the first one ({' '.join(str(error).split()) or 'an AssertionError'}): reentrant activation "
        "checkpointing runs a backward for each use of a block, where a block is used twice in a forward or two "
        "forwards have one backward. Its pass is counted, so load a checkpoint into a new engine; set "
        f"use_reentrant=False, or use ZeRO 0, or 1 without overlap_comm{smaller if stage == _PARTITIONED else ''}"
    ) from error


def _innermost(traceback: TracebackType | None) -> str:
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_code.co_name, traceback.tb_next
    return name
