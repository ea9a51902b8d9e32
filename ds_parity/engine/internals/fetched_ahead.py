"""Says what it means where a forward of ZeRO 3 finds a weight that another engine over the same model fetches."""

from __future__ import annotations

from typing import Final

from ds_parity.engine.internals.other_modules import raised_by_deepspeed
from ds_parity.errors import WindowError

# zero/partitioned_param_coordinator.py, fetch_sub_module, asserts that a weight is there whose status is this one: no
# handle of this engine waits for it. tools/deepspeed_faults/engines_of_one_model.py shows it.
_SAID: Final = "'INFLIGHT'"


def explain_fetched(error: Exception) -> None:
    """Raise WindowError where a forward has raised because a weight is on its way for another engine.

    Args:
        error: that the forward has raised.
    """
    if not (isinstance(error, AssertionError) and raised_by_deepspeed(error) and _SAID in str(error)):
        return
    said = " ".join(str(error).split())[:200]
    raise WindowError(
        f"a forward on ZeRO stage 3 needs a weight that is being fetched, and not for this engine ({said}): "
        "engines over one model fetch its weights ahead, each by itself. Set "
        "zero_optimization.stage3_prefetch_bucket_size to 0 in each of these engines, use ZeRO stage 0 to 2, or give "
        "each engine a model of its own"
    ) from error
