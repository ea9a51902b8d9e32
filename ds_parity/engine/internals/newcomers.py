"""Parameters that came into a model after its engine was built: an adapter that is added, a layer that is replaced.

DeepSpeed collects what it trains once. A parameter that comes later gets gradients and is in no group of the optimizer,
so that it is never trained on ZeRO 0 to 2, without a word. ZeRO 3 raises an AttributeError in its forward, or in the
step, where it partitions all parameters of the model again, frozen ones too.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Final

from ds_parity.errors import WindowError

if TYPE_CHECKING:
    from ds_parity.engine.internals.base import Adapter
    from ds_parity.engine.internals.surface import Engine, Parameter

_WAY_OUT: Final = (
    "add and replace parameters before the engine is built, or build a new engine over the model as it is now (with "
    "ZeRO stage 0 in fp32, engine.optimizer.add_param_group will do)"
)


class Newcomers:
    """Looks for gradients of parameters that nobody steps.

    Args:
        adapter: of the engine.
    """

    _everybody: Final[weakref.WeakSet[Newcomers]] = weakref.WeakSet()
    # Orders what engines do. It goes by windows, so that it is alike on every rank; when one is collected is not.
    _clock: Final = itertools.count(1)

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._known: dict[int, Parameter] = {}
        self._built = self._used = 0

    def begin(self) -> None:
        """Take the parameters that are there as those that the engine was built with."""
        # They are held, so that none that comes later is given the id of one that went.
        self._known = {id(p): p for p in self._adapter.engine.module.parameters()}
        self._built = next(self._clock)
        self._everybody.add(self)

    def end(self) -> None:
        """Step nothing any more: the engine is destroyed."""
        self._everybody.discard(self)

    def refuse(self) -> None:
        """Raise WindowError where one has a gradient, and on ZeRO 3 where there is one that it has not partitioned.

        It is asked in a window's second pass and before its step.
        """
        self.use()
        came = self._new()
        if whole := self._whole(came):
            raise WindowError(
                f"{names_of(whole)}: not in the model when its engine was built, so that ZeRO stage 3 has not "
                f"partitioned it, and its step would raise in the middle, also where it is frozen; {_WAY_OUT}"
            )
        new = [one for one in came if one[1].grad is not None]
        # Nearly always there is none, and the groups are not looked at.
        owned = stepped_by_any() if new else set()
        lost = [one for one in new if id(one[1]) not in owned]
        if lost:
            raise WindowError(
                f"{names_of(lost)}: not in the model when its engine was built, so that no group of the optimizer "
                f"holds it, and its gradient would never be applied; {_WAY_OUT}"
            )

    def explain(self, error: AttributeError) -> None:
        """Raise WindowError in place of what a forward of ZeRO 3 raises over a parameter that it has not partitioned.

        Args:
            error: that the forward has raised.
        """
        if whole := self._whole(self._new()):
            raise WindowError(
                f"{names_of(whole)}: not in the model when its engine was built, so that ZeRO stage 3 has not "
                f"partitioned it, and its forward raises ({error}); {_WAY_OUT}"
            ) from error

    def clears_all(self) -> bool:
        """Return whether another engine over this model is on ZeRO 0, whose step clears the gradients of all of it."""
        others = (other for other in self._everybody if other is not self and other._known.keys() & self._known.keys())
        return any(other._adapter.engine.zero_optimization_stage() == 0 for other in others)

    def _whole(self, came: list[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
        stage = self._adapter.engine.zero_optimization_stage()
        return [one for one in came if stage == 3 and not hasattr(one[1], "ds_id")]

    def _new(self) -> list[tuple[str, Parameter]]:
        named = self._adapter.engine.module.named_parameters()
        return [(name, p) for name, p in named if id(p) not in self._known]

    def _stepped(self) -> set[int]:
        return {id(p) for group in self._adapter.groups() for p in group}

    def use(self) -> None:
        """Note that the engine is in use."""
        self._used = next(self._clock)

    def in_use_beside(self, other: Newcomers) -> bool | None:
        """Return whether the engine is in use beside another one, or that one has taken its place; None for either.

        DeepSpeed's hooks keep an engine that its caller has let go of without `destroy()`, so that it can't be seen.
        """
        if max(self._built, self._used) > other._built:
            return True
        if self._used:
            return None
        # Built before, and never used: by a loop that begins with a load, or tried and given up for the other one.
        return self._stepped().isdisjoint(other._stepped())


def stepped_by_any() -> set[int]:
    """Return the ids of the parameters that the engines of this process step."""
    return set().union(*(one._stepped() for one in Newcomers._everybody))


def stepped_by_others(engine: Engine, *, doubtful: bool = False) -> set[int]:
    """Return the ids of the parameters that other engines step, but for those whose place this one has taken.

    Args:
        engine: a bare DeepSpeed engine.
        doubtful: of those alone whose place may be taken or not: used before this one was built, and not since.
    """
    own = next((one for one in Newcomers._everybody if one._adapter.engine is engine), None)
    others = [one for one in Newcomers._everybody if one is not own]
    states = [(it, True if own is None else it.in_use_beside(own)) for it in others]
    wanted = (None,) if doubtful else (True, None)
    return set().union(*(it._stepped() for it, used in states if used in wanted))


def names_of(parameters: list[tuple[str, Parameter]]) -> str:
    """Return the first names, and how many more there are."""
    names = [name for name, _ in parameters]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
