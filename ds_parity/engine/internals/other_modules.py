"""Says what it means where DeepSpeed notices, in a forward of ZeRO 3, that ranks have run different modules."""

from __future__ import annotations

from ds_parity.errors import WindowError

# runtime/zero/utils.py, assert_ints_same_as_other_ranks: on every rank that differs from the first, and not on that.
_SAID = "Detected a disagreement on list"


def explain(error: Exception) -> None:
    """Raise WindowError where a forward has raised because ranks ran different modules in the pass before.

    Args:
        error: that the forward has raised.
    """
    if _SAID not in str(error):
        return
    raise WindowError(
        "ranks ran different modules in a pass on ZeRO stage 3, which puts together the parts of different parameters "
        f"then ({' '.join(str(error).split())}): use every module in every pass on every rank, make a layer of experts "
        "a leaf module (zero_optimization.leaf_module), or use ZeRO stage 0 or 1. Load a checkpoint into a new engine"
    ) from error
