"""Says what DeepSpeed's errors mean where one backward brings the gradient of a parameter twice, or without a value."""

from __future__ import annotations

from traceback import walk_tb

from ds_parity.errors import WindowError

# ZeRO 1 with overlap_comm and ZeRO 2 say it (stage_1_and_2.py); ZeRO 3 asserts, without a word, that no bucket contains
# a parameter twice, or asks a gradient that it has just reduced for its size (stage3.py, both functions).
_PARTITIONED = 3
_SAID, _SILENT_IN = "already been reduced", ("__reduce_and_partition_ipg_grads", "__add_grad_to_ipg_bucket")
# ZeRO 1 with overlap_comm and ZeRO 2 ask a gradient that a function of autograd has not given for its view, or for its
# queue on an accelerator; without contiguous_gradients they say it.
_VALUELESS_IN, _VALUELESS_SAID = "reduce_independent_p_g_buckets_and_remove_grads", "with None gradient"
_NO_VALUE = "a function of autograd whose backward returns None for a parameter that requires a gradient"


def explain(error: Exception, stage: int) -> None:
    """Raise WindowError where a backward has raised because it brought a gradient twice, or None in its place.

    Args:
        error: that the backward has raised.
        stage: of ZeRO.
    """
    raised_in = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    said = " ".join(str(error).split()) or "an AssertionError"
    without_value = isinstance(error, AttributeError) and "NoneType" in said
    if _VALUELESS_SAID in said or (without_value and _VALUELESS_IN in raised_in):
        raise WindowError(
            f"one backward() brought a parameter to DeepSpeed's ZeRO stage {stage} without a gradient ({said}), as "
            f"{_NO_VALUE} does. Its pass is counted, so load a checkpoint into a new engine; return zeros there, or "
            "use ZeRO 0, or 1 without overlap_comm"
        ) from error
    if _SAID not in said and not (raised_in and raised_in[-1] in _SILENT_IN):
        return
    smaller = ", or, where other parameters lie between its uses, zero_optimization.reduce_bucket_size below their size"
    what = (
        f"a parameter to DeepSpeed's ZeRO stage {stage} without a gradient, or twice"
        if without_value
        else f"the gradient of a parameter twice, and DeepSpeed's ZeRO stage {stage} has reduced, or kept, the first"
    )
    none = f"{_NO_VALUE} does the former (return zeros there); the latter is " if without_value else ""
    raise WindowError(
        f"one backward() brought {what} ({said}): {none}reentrant activation checkpointing, which runs a backward for "
        "each use of a block, where a block is used twice in a forward or two forwards have one backward. Its pass is "
        "counted, so load a checkpoint into a new engine; set use_reentrant=False, or use ZeRO 0, or 1 without "
        f"overlap_comm{smaller if stage == _PARTITIONED else ''}"
    ) from error
