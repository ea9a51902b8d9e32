"""Lets ranks have the parameter groups of experts in one order, where DeepSpeed makes these groups itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from deepspeed.runtime import engine as deepspeed_engine

from ds_parity.engine.internals.replaced import wrapped

_SPLIT: Final = "configure_moe_param_groups"


@contextmanager
def experts_in_one_order() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an optimizer over experts of several `ep_size`.

    It makes a group for each size in the order of a set of names, which is another in each process (moe/utils.py,
    split_params_into_different_moe_groups_for_optimizer, 0.19.8), and ZeRO adds up gradients by the place of a group
    (tools/deepspeed_faults/experts_in_any_order.py). Groups that a loop has made are compared over the ranks.
    """
    if not hasattr(deepspeed_engine, _SPLIT):
        yield
        return
    with wrapped(deepspeed_engine, _SPLIT, _sorted):
        yield


def _sorted(split: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def in_one_order(*args: Any, **kwargs: Any) -> list[Any]:
        return sorted(split(*args, **kwargs), key=_size)  # the others, and those of one size, stay as they are

    return in_one_order


def _size(group: Any) -> str:
    return str(group.get("name", "")) if isinstance(group, dict) and group.get("moe") else ""
