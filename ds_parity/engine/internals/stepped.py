"""`step()` of an engine's optimizers: the engine's own step may call it, and nobody else; and groups that come late.

A step that a loop takes itself uses gradients before they are reduced, so that ranks' weights part on ZeRO 0 without a
word. ZeRO 1 to 3 have nothing in place for it between an engine's steps: it ends in a KeyError, or, with offload, takes
the last gradient once more.

A group that is added to an optimizer inside a wrapper is no part of the partitions or copies that the wrapper steps: it
is never trained on ZeRO 1 and 2, without a word, and ends in a RuntimeError of torch on ZeRO 3.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ds_parity.errors import WindowError

if TYPE_CHECKING:
    from ds_parity.engine.internals.surface import Engine


class Watcher(Protocol):
    """Knows when an engine itself steps its optimizers."""

    def keeps_steps(self, *, always: bool) -> bool:
        """Whether nobody but the engine may step them now; `always`: also between windows."""


def guard_optimizers(watcher: Watcher, engine: Engine) -> None:
    """Make `step()` of an engine's optimizers raise WindowError past the engine, and new groups inside a wrapper.

    Args:
        watcher: of the engine; an optimizer may outlive it, and must neither keep it alive nor be bound by it then.
        engine: the bare DeepSpeed engine.
    """
    optimizer, inner = engine.optimizer, engine.basic_optimizer
    guard_step(watcher, optimizer, always=not isinstance(optimizer, torch.optim.Optimizer))
    if inner is not optimizer:
        guard_step(watcher, inner, always=True)
        where = f"ZeRO stage {engine.zero_optimization_stage()} ({type(optimizer).__name__})"
        for owner in (inner, optimizer):
            refuse_groups(watcher, owner, where)


def guard_step(watcher: Watcher, owner: Any, *, always: bool) -> None:
    """Make `owner.step()` raise WindowError where it is called past its engine.

    Args:
        watcher: of the engine; the owner may outlive it, and must neither keep it alive nor be bound by it then.
        owner: an optimizer, or DeepSpeed's wrapper of one.
        always: also between windows. torch's own optimizer has no gradients there and does nothing.
    """
    step: Callable[..., Any] = owner.step
    watching = weakref.ref(watcher)

    @functools.wraps(getattr(step, "__func__", step))
    def guarded(_: Any, *args: Any, **kwargs: Any) -> Any:
        kept = watching()
        if kept is not None and kept.keeps_steps(always=always):
            raise WindowError(
                f"step() of the optimizer ({type(owner).__name__}) was called by itself: it would use gradients that "
                "are not complete, not reduced over ranks or not divided by the window's total, and nothing would "
                "count it; call engine.step() after every engine.backward(), which steps the optimizer at the boundary "
                "(an engine that is not used any more lets go of it with engine.destroy())"
            )
        return step(*args, **kwargs)

    # A bound method, because torch's schedulers take the function out of it, and GradScaler looks at its signature.
    owner.step = types.MethodType(guarded, owner)


def refuse_groups(watcher: Watcher, owner: Any, where: str) -> None:
    """Make `owner.add_param_group()` raise WindowError: DeepSpeed has divided, or copied, the groups that there are.

    Args:
        watcher: of the engine, as in `guard_step`.
        owner: an optimizer inside a wrapper, or the wrapper.
        where: the stage and the wrapper, for the message.
    """
    add: Callable[..., Any] | None = getattr(owner, "add_param_group", None)
    watching = weakref.ref(watcher)

    def refused(_: Any, *args: Any, **kwargs: Any) -> Any:
        kept = watching()
        if add is not None and (kept is None or not kept.keeps_steps(always=True)):
            return add(*args, **kwargs)
        raise WindowError(
            f"add_param_group() on {where}: DeepSpeed took the parameters of its groups when the engine was built, so "
            "that a group which comes later would never be trained; give the optimizer all that will ever be "
            "trained before initialize(), with lr 0 for as long as a group is to rest, or build a new engine (ZeRO "
            "stage 0 in fp32 takes new groups)"
        )

    owner.add_param_group = types.MethodType(refused, owner)
