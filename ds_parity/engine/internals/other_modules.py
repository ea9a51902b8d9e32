"""Says what it means where DeepSpeed notices, in a forward of ZeRO 3, that ranks have run different modules."""

from __future__ import annotations

from ds_parity.errors import WindowError, modules_through

# runtime/zero/utils.py, assert_ints_same_as_other_ranks: on every rank that differs from the first, and not on that.
_SAID = "Detected a disagreement on list"


def raised_by_deepspeed(error: Exception) -> bool:
    """Whether DeepSpeed has raised it: what a model raises may read alike, and is the loop's to see as it is."""
    return any(name.startswith("deepspeed.") for name in modules_through(error)[-1:])


def explain(error: Exception) -> None:
    """Raise WindowError where a forward has raised because ranks ran different modules in the pass before.

    DeepSpeed notes a module once for each tensor that it has returned, as the backward comes to them. So ranks that run
    the same modules differ, too, where one of these returns a tensor a rollout, and ranks have other numbers of them.

    Args:
        error: that the forward has raised.
    """
    if not raised_by_deepspeed(error) or _SAID not in str(error):
        return
    raise WindowError(
        "ranks ran different modules in a pass on ZeRO stage 3, or a module returned other numbers of tensors, "
        f"and DeepSpeed then puts together the parts of different parameters ({' '.join(str(error).split())}): use "
        "every module in every pass on every rank, return one tensor of all rollouts in place of a list with one of "
        "each, make a layer of experts a leaf module (zero_optimization.leaf_module), or use ZeRO stage 0 or 1. Load a "
        "checkpoint into a new engine"
    ) from error
