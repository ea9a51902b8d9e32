"""ZeRO 3 of DeepSpeed before 0.19.3: weights of modules whose backward has begun and is never said to have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_parity.engine.internals.older_surface import OlderZero3


def release_leftovers(optimizer: OlderZero3) -> None:
    """Have a backward release, at its end, what the end of no module's backward has released.

    DeepSpeed hears that a module's backward has ended by the gradient of its inputs. The first layer's inputs have none
    (token ids), so that its weights stay in use until the step, and an AssertionError ends `GatheredParameters` between
    passes. Later releases do as here (runtime/zero/partitioned_param_coordinator.py, 0.19.3,
    release_backward_leftovers).

    Args:
        optimizer: DeepSpeedZeroOptimizer_Stage3 of an engine that has not run a pass.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if hasattr(coordinator, "release_backward_leftovers"):
        return
    fetch, release = coordinator.fetch_sub_module, coordinator.release_sub_module
    epilogue = optimizer.backward_epilogue
    begun: dict[int, Any] = {}

    def fetch_sub_module(current_submodule: Any, forward: bool) -> None:
        if not forward:
            begun[current_submodule.ds_id] = current_submodule
        fetch(current_submodule, forward=forward)

    def release_sub_module(submodule: Any, forward: bool = False) -> None:
        if not forward:
            begun.pop(submodule.ds_id, None)
        release(submodule, forward=forward)

    def backward_epilogue() -> None:
        epilogue()
        while begun:
            _, left = begun.popitem()
            release(left, forward=False)

    # As DeepSpeed's own are: engine.compile() would trace them.
    untraced: Callable[..., Any] = torch.compiler.disable
    coordinator.fetch_sub_module = untraced(fetch_sub_module)
    coordinator.release_sub_module = untraced(release_sub_module)
    optimizer.backward_epilogue = backward_epilogue
