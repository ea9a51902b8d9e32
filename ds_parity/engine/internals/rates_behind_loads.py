"""The learning rates in an optimizer's groups behind a load of its states, or of the scheduler's, alone."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from deepspeed.runtime import lr_schedules

from ds_parity.engine.internals.schedule import BY_ITERATION, behind_proxy
from ds_parity.engine.internals.surface import Engine

_LOG = logging.getLogger("ds_parity")

# What torch's schedulers (OneCycleLR, CyclicLR, SWALR) keep in the optimizer's groups, and what some of them cycle.
_OF_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_CYCLED = ("betas", "momentum")
_MOST_ELEMENTS = 1000


@dataclass(frozen=True, slots=True)
class _Awaiting:
    """A load without the scheduler's state, which its loop may load itself, or has loaded before.

    Attributes:
        scheduler: refers to the engine's, or to one that was taken away from it, if it is still there.
        stood: what `state_of_schedule` was behind the load; None where it may have been loaded before.
        state: what it was where it was saved.
        left: what the groups had behind the load.
        rates: what they had where it was saved; None where nothing tells.
    """

    scheduler: Callable[[], Any]
    stood: Any
    state: Any
    left: Sequence[Mapping[str, Any]]
    rates: Sequence[Mapping[str, Any]] | None


_AWAITING: WeakKeyDictionary[Any, _Awaiting] = WeakKeyDictionary()
"""Of an engine's optimizer, until its next step. What is kept here must not hold the optimizer."""


def state_of_schedule(scheduler: Any) -> Any:
    """Return a scheduler's state as it can be compared: numbers and texts, in lists and dicts; None without any.

    Args:
        scheduler: an engine's, or one that was taken away from it; None for none.
    """
    try:
        return None if scheduler is None else _comparable(behind_proxy(scheduler).state_dict())
    except Exception:  # one that was taken away may have none
        return None


def state_in_checkpoint(client_state: Mapping[str, Any]) -> Any:
    """Return what `state_of_schedule` was where DeepSpeed saved a checkpoint, of ds_parity or of none.

    Args:
        client_state: what DeepSpeed returns behind a load without the scheduler's state, which it leaves in there
            (engine.py, `_load_checkpoint`, 0.19.8). It has none of a scheduler that was taken away from the engine.
    """
    return _comparable(client_state.get("lr_scheduler"))


def _comparable(state: Any) -> Any:
    try:
        plain = _plain(state)
    except Exception:  # it may hold itself, or what has no values
        plain = _digest(state)
    return None if plain in ({}, []) else plain


def _plain(value: Any) -> Any:
    """The same, with digests of what is large or of other types, and without what has none, such as a lambda."""
    plain: Any
    if value is None or isinstance(value, int | float | str):
        plain = "NaN" if isinstance(value, float) and math.isnan(value) else value  # a text equals itself
    elif isinstance(value, torch.Tensor | np.ndarray | np.generic):
        plain = _plain(value.tolist())
    elif isinstance(value, list | tuple) and len(value) <= _MOST_ELEMENTS:
        plain = [_plain(one) for one in value]
    elif isinstance(value, set | frozenset):
        plain = sorted(repr(_plain(one)) for one in value)  # its own order is another one in each process
    elif isinstance(value, Mapping):
        plain = {str(name): one for name, item in value.items() if (one := _plain(item)) is not None}
    elif hasattr(value, "__dict__") and not callable(value):
        plain = _plain(vars(value))
    else:
        plain = _digest(value)
    return plain


def _digest(value: Any) -> str | None:
    try:
        return sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # it can't be pickled
        return None


def moved_by_the_schedule(engine: Engine, *, whatever_moves: bool = False) -> list[dict[str, Any]]:
    """Return what the scheduler keeps in the optimizer's groups, such as the rate of each, as values of their own.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        whatever_moves: also what this scheduler does not move, and others do.
    """
    return _values(engine, {*_OF_SCHEDULERS, *_CYCLED} if whatever_moves else _moved_by(engine.lr_scheduler))


def _values(engine: Engine, names: Container[str]) -> list[dict[str, Any]]:
    return [
        {name: _copied(value) for name, value in group.items() if name in names}
        for group in engine.optimizer.param_groups
    ]


def kind_of_schedule(engine: Engine) -> str | None:
    """Return the name of the class of an engine's LR scheduler; None without one.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    scheduler = behind_proxy(engine.lr_scheduler)
    return None if scheduler is None else type(scheduler).__name__


def warn_of_another_schedule(engine: Engine, saved: str | None) -> None:
    """Warn where a scheduler has loaded the state of one of another class, which torch's do without a word.

    DeepSpeed's own are not warned of: their state is a position, which each of them takes alike.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not, behind the load of the scheduler's state.
        saved: what `kind_of_schedule` was when it was saved; None where the checkpoint does not tell.
    """
    own = kind_of_schedule(engine)
    if own is None or saved in (None, own) or {own, saved} <= set(lr_schedules.VALID_LR_SCHEDULES):
        return
    _LOG.warning(
        "the checkpoint was saved with the LR scheduler %s, and %s has loaded its state: what both keep under one name "
        "has the value of the checkpoint, so that the learning rates may be those of neither. Give "
        "load_lr_scheduler_states=False, which begins the schedule here, or load it with the scheduler that saved it",
        saved,
        own,
    )


def _moved_by(scheduler: Any) -> set[str]:
    cycled = _CYCLED if getattr(behind_proxy(scheduler), "cycle_momentum", False) else ()
    return {*_OF_SCHEDULERS, *cycled}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def follow_the_schedule(
    engine: Engine,
    before: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]] | None,
    *,
    scheduler: bool,
    optimizer: bool,
) -> None:
    """Give the groups the rates of the schedule behind a load of the scheduler's state, or of the optimizer's, alone.

    Rates are kept in the groups of the optimizer. Most of torch's schedulers go on from the rate that they find there,
    so that one which is another's stays wrong for ever: behind such a load StepLR, ExponentialLR and CosineAnnealingLR
    give a multiple of what they are due (tools/deepspeed_faults/rates_of_others.py). OneCycleLR keeps its bounds there.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not, behind the load.
        before: what `moved_by_the_schedule` was in front of it, with what other schedulers move.
        saved: what it was, without that, of the engine that saved; None where the checkpoint does not tell.
        scheduler: the scheduler's state was loaded.
        optimizer: the optimizer's states were loaded.
    """
    groups = engine.optimizer.param_groups
    _AWAITING.pop(engine.optimizer, None)
    if engine.lr_scheduler is None or scheduler == optimizer or len(before) != len(groups):
        return
    due, moved = before, _moved_by(engine.lr_scheduler)
    if optimizer:
        # What another scheduler had moved was loaded with the optimizer.
        moved |= {name for group in saved or () for name in group}
    else:
        due = _due(behind_proxy(engine.lr_scheduler), saved, len(groups))
    for group, own, values in zip(groups, before, due, strict=True):
        # Another scheduler, or another optimizer, may have been saved, which moved what none moves here.
        for name in own.keys() & values.keys() & moved:
            _put(group, name, values[name])


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    if name == "betas" and name in group:
        # The first is cycled, and the others are the optimizer's own (OneCycleLR and CyclicLR of torch 2.13.0, OneCycle
        # of DeepSpeed 0.19.8).
        first, *others = group[name]
        group[name] = type(group[name])((_of_the_kind(first, value[0]), *others))
    else:
        group[name] = _of_the_kind(group.get(name), value)


class Standing:
    """Where a scheduler stood last: when the engine was built, or behind its last step or load of a checkpoint.

    Args:
        scheduler: the engine's, or None, here and below; it may be another one each time.
    """

    def __init__(self, scheduler: Any) -> None:
        self._state: Any = None
        self._place: Any = None
        self.loaded(scheduler)
        self._began_further = _is_behind_its_start(scheduler)

    def loaded(self, scheduler: Any) -> None:
        """Say that it stands where a load of a checkpoint has left it."""
        self._state, self._place, self._began_further = state_of_schedule(scheduler), None, False

    def stepped(self, scheduler: Any) -> None:
        """Say that it stands where a step has left it; a state is not asked for in each step."""
        self._state, self._place, self._began_further = None, _place_of(scheduler), False

    def has_left(self, scheduler: Any) -> bool | None:
        """Return whether it stands elsewhere by now, as one does that a loop has loaded; None where nothing tells."""
        if self._began_further:  # a loop has loaded it before it built the engine
            return True
        if self._state is not None:
            return bool(state_of_schedule(scheduler) != self._state)
        return None if self._place is None else bool(_place_of(scheduler) != self._place)

    def tells_its_rates(self, scheduler: Any) -> bool:
        """Return whether they are those of its position, which it may have come to before the build without a load."""
        return self._began_further and isinstance(behind_proxy(scheduler), BY_ITERATION)


def _is_behind_its_start(scheduler: Any) -> bool:
    """Whether a new engine's scheduler has been stepped or loaded, or was made to go on; False where nothing tells."""
    own = behind_proxy(scheduler)
    if isinstance(own, torch.optim.lr_scheduler.ChainedScheduler):  # it has no position of its own
        return any(map(_is_behind_its_start, own._schedulers))
    try:
        position = getattr(own, "last_batch_iteration" if isinstance(own, BY_ITERATION) else "last_epoch", 0)
    except Exception:  # one's own name for something else
        return False
    return isinstance(position, int | float) and position > 0


def _place_of(scheduler: Any) -> tuple[float, ...] | None:
    """Return the position and the last rates of a scheduler of torch's or DeepSpeed's; None of one that has no such."""
    own = behind_proxy(scheduler)
    try:
        if isinstance(own, BY_ITERATION):
            return (float(own.last_batch_iteration),)
        rates = [float(one) for one in getattr(own, "_last_lr", ())]
        position = getattr(own, "last_epoch", 0)
    except Exception:  # a name that a scheduler of one's own uses for something else
        return None
    return (float(position), *rates) if rates and isinstance(position, int | float) else None


def await_a_loop(
    engine: Engine,
    scheduler: Any,
    left: bool | None,
    state: Any,
    rates: Sequence[Mapping[str, Any]] | None,
    *,
    tells_its_rates: bool = False,
) -> None:
    """Remember, behind a load without the scheduler's state, what it was: the loop may load that itself.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        scheduler: its own, or one that was taken away from it; None for none.
        left: whether a loop has moved it since the last step or load, so that it may have loaded it before this load;
            None where nothing tells.
        state: what it was where it was saved; None where the checkpoint does not tell.
        rates: what `moved_by_the_schedule` was there; likewise. They are those of the scheduler then, once loaded.
        tells_its_rates: so are they also where the checkpoint tells others.
    """
    groups = engine.optimizer.param_groups
    if scheduler is None or state is None or (rates is not None and len(rates) != len(groups)):
        return
    stood, values = state_of_schedule(scheduler), _values(engine, _moved_by(scheduler))
    try:
        refers = ref(behind_proxy(scheduler))
    except TypeError:  # of a class that can't be referred to
        return
    _AWAITING[engine.optimizer] = _Awaiting(
        refers, None if left else stood, state, values, None if tells_its_rates else rates
    )
    if left is None and stood == state and (rates is None or values != [*rates]):
        _LOG.warning(
            "the scheduler %s stands where that of the checkpoint did, and nothing tells whether a loop has loaded it: "
            "the learning rates stay those of this engine. A loop that has loaded it does so once more, behind "
            "load_checkpoint(load_lr_scheduler_states=False)",
            type(behind_proxy(scheduler)).__name__,
        )


def loop_has_loaded(engine: Engine) -> bool:
    """Return whether the scheduler has the state of a checkpoint that was loaded without it since the last step.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    awaiting = _AWAITING.get(engine.optimizer)
    scheduler = awaiting and (engine.lr_scheduler if engine.lr_scheduler is not None else awaiting.scheduler())
    if awaiting is None or scheduler is None:
        return False
    now = state_of_schedule(scheduler)
    return now != awaiting.stood and (now == awaiting.state or _is_in_its_place(now, awaiting))


def _is_in_its_place(now: Any, awaiting: _Awaiting) -> bool:
    """Whether a scheduler of torch stands where the checkpoint's did, at its rates, whatever else is in its state."""
    states = (now, awaiting.state)
    epochs = [one.get("last_epoch") if isinstance(one, Mapping) else None for one in states]
    if now != awaiting.state and (epochs[0] is None or epochs[0] != epochs[1]):
        return False
    here, there = (_last_rates(one, len(awaiting.left)) for one in states)
    known = awaiting.rates is None or here == [float(one["lr"]) for one in awaiting.rates if "lr" in one]
    return here is not None and here == there and known


def follow_a_loop(engine: Engine, *, saves: bool = False) -> bool:
    """Give the groups the rates of the checkpoint before the next step, where `loop_has_loaded`; return whether it has.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        saves: before a save in place of a step, behind which the loop may still load.
    """
    loaded, awaiting = loop_has_loaded(engine), _AWAITING.get(engine.optimizer)
    if not (saves and not loaded):
        _AWAITING.pop(engine.optimizer, None)
    if awaiting is None or not loaded:
        return False
    moved, groups = _moved_by(awaiting.scheduler()), engine.optimizer.param_groups
    if _values(engine, moved) == awaiting.left:  # a loop that has set rates itself knows them
        scheduler = engine.lr_scheduler if engine.lr_scheduler is not None else awaiting.scheduler()
        rates = awaiting.rates or _due(behind_proxy(scheduler), None, len(groups))
        for group, values in zip(groups, rates, strict=True):
            for name in group.keys() & values.keys() & moved:
                _put(group, name, values[name])
    return True


def _of_the_kind(own: Any, value: Any) -> Any:
    """A value as the group has it: torch's optimizers step by a rate that is a tensor in some of their ways alone."""
    if isinstance(own, torch.Tensor):
        return own.fill_(float(value))
    return float(value) if isinstance(value, torch.Tensor) else value


def _due(scheduler: Any, saved: Sequence[Mapping[str, Any]] | None, groups: int) -> Sequence[Mapping[str, Any]]:
    """What the groups have where a scheduler stands that was loaded; nothing of one that has not begun."""
    known = [{}] * groups if saved is None or len(saved) != groups else saved
    if isinstance(scheduler, BY_ITERATION):
        # A function of its step and of what this configuration says.
        rates = scheduler.get_lr() if scheduler.last_batch_iteration >= 0 else None
    elif all("lr" in one for one in known):
        # What the groups had: a loop may have moved it beside the scheduler.
        return known
    else:
        rates = _last_rates(scheduler.state_dict(), groups)
        if rates is None:
            _LOG.warning(
                "neither the checkpoint nor the state of the scheduler %s has a rate for each parameter group, and the "
                "optimizer's states were not loaded: the learning rates stay as they are until its next step. Set the "
                "lr of each group to what the schedule has there, if that step goes on from it",
                type(scheduler).__name__,
            )
    if rates is None or len(rates) != groups:
        return known
    return [{**one, "lr": float(rate)} for one, rate in zip(known, rates, strict=True)]


def _last_rates(state: Any, groups: int) -> list[float] | None:
    """What states of torch's schedulers keep as the rates that these gave last; None where one has no such numbers."""
    last = state.get("_last_lr") if isinstance(state, Mapping) else None
    try:
        rates = [float(rate) for rate in last] if last is not None and not isinstance(last, str | Mapping) else []
    except (TypeError, ValueError):  # a name that a scheduler of one's own uses for something else
        return None
    return rates if len(rates) == groups else None
