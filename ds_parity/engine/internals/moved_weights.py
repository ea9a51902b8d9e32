"""Weights that a step has changed between a forward and its backward.

DeepSpeed's ZeRO writes new weights through `.data`, which autograd does not see: the backward of a forward that lies in
front of the step then takes the new weights with the old activations, and its gradient is that of neither. Bare
DeepSpeed says nothing (tools/deepspeed_faults/forward_before_the_step.py); torch's own optimizers are seen (ZeRO 0 in
fp32).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_parity.errors import WindowError

_TORCH_SAYS = "modified by an inplace operation"


def let_autograd_know(groups: Iterable[Iterable[torch.Tensor]]) -> None:
    """Have autograd know that a step has changed parameters in place, as it knows of torch's own optimizers.

    Args:
        groups: the parameters that the optimizer steps.
    """
    # A parameter that was made under inference_mode() has no version, and is in no graph either.
    moved = [one for group in groups for one in group if not one.is_inference()]
    torch.autograd.graph.increment_version(moved)


def explain(error: RuntimeError) -> None:
    """Raise WindowError where a backward needs weights as they were before a step.

    Args:
        error: that torch has raised in a backward; anything else passes.

    Raises:
        WindowError: something that the backward needs was changed in place since the forward.
    """
    if _TORCH_SAYS in str(error):
        raise WindowError(
            "backward() needs what was changed in place since its forward: most often weights, by a step() that lies "
            "between the two. The gradient would mix old activations with new weights, so its forward must run behind "
            f"the last step(), and its backward before the next. Its pass is counted, so load a checkpoint into a new "
            f"engine. torch says: {error}"
        ) from error
