"""The states of ZeRO 1 and 2 that `safe_get_full_optimizer_state` reads: linked to parameters when they are there.

DeepSpeed links them behind the first step of the first parameter group, once and for all (stage_1_and_2.py,
`_lazy_init_hp_params_optimizer_state`, 0.19.8). Those of later groups are not there yet (tools/deepspeed_faults/
states_of_later_groups.py), and a load or `reload_states()` undoes the link (`_link_all_hp_params`): the rank that has
the parameter raises then, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_parity.engine.internals.surface import LinkedOptimizer


def keep_states_linked(optimizer: LinkedOptimizer, inner: Any, flats: Sequence[torch.Tensor]) -> None:
    """Link the states of all groups behind the first step, and again where DeepSpeed links parameters anew.

    Args:
        optimizer: DeepSpeed's wrapper on ZeRO 1 or 2.
        inner: the optimizer that it wraps.
        flats: what this rank steps, a tensor for each parameter group.
    """
    link, link_states = optimizer._link_all_hp_params, optimizer._lazy_init_hp_params_optimizer_state
    steps = 0  # of groups, since parameters were linked

    def linked_behind_each_group() -> None:
        nonlocal steps
        if not optimizer._hp_optimizer_states_linked:
            link_states()
            steps += 1
            optimizer._hp_optimizer_states_linked = steps >= len(flats)

    def link_what_is_there() -> None:
        nonlocal steps
        steps = 0
        optimizer._hp_optimizer_states_linked = False
        if all(inner.state.get(one) for one in flats):
            link_states()

    def linked_anew() -> None:
        link()
        link_what_is_there()

    optimizer._lazy_init_hp_params_optimizer_state = linked_behind_each_group  # type: ignore[method-assign]
    optimizer._link_all_hp_params = linked_anew  # type: ignore[method-assign]
    reload = getattr(optimizer, "reload_states", None)
    if reload is None:  # BF16_Optimizer
        return

    def reloaded(*args: Any, **kwargs: Any) -> None:
        reload(*args, **kwargs)
        link_what_is_there()  # the optimizer's states come behind the parameters, as new tensors

    vars(optimizer)["reload_states"] = reloaded
