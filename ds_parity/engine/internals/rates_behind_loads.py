"""The learning rates in an optimizer's groups behind a load of its states, or of the scheduler's, alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.runtime import lr_schedules

from ds_parity.engine.internals.schedule import BY_ITERATION, behind_proxy, stands_at
from ds_parity.engine.internals.surface import Engine

_LOG = logging.getLogger("ds_parity")

# What torch's schedulers (OneCycleLR, CyclicLR, SWALR) keep in the optimizer's groups, and what some of them cycle.
_OF_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_CYCLED = ("betas", "momentum")


@dataclass(frozen=True, slots=True)
class _Awaiting:
    """A load without the scheduler's state, which its loop may load itself.

    Attributes:
        stood: where the scheduler stood behind it, as `stands_at` returns it.
        left: what the groups had behind it.
        saved: what they had where it was saved.
    """

    stood: float | None
    left: Sequence[Mapping[str, Any]]
    saved: Sequence[Mapping[str, Any]]


_AWAITING: WeakKeyDictionary[Any, _Awaiting] = WeakKeyDictionary()
"""Of an engine's optimizer, until its next step."""


def moved_by_the_schedule(engine: Engine, *, whatever_moves: bool = False) -> list[dict[str, Any]]:
    """Return what the scheduler keeps in the optimizer's groups, such as the rate of each, as values of their own.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        whatever_moves: also what this scheduler does not move, and others do.
    """
    names = {*_OF_SCHEDULERS, *_CYCLED} if whatever_moves else _moved_by(engine.lr_scheduler)
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
            if name == "betas" and name in group:
                # The first is cycled, and the others are the optimizer's own (OneCycleLR and CyclicLR of torch 2.13.0,
                # OneCycle of DeepSpeed 0.19.8).
                first, *others = group[name]
                group[name] = type(group[name])((_of_the_kind(first, values[name][0]), *others))
            else:
                group[name] = _of_the_kind(group.get(name), values[name])
    if optimizer and saved is not None and len(saved) == len(groups):
        stood = stands_at(behind_proxy(engine.lr_scheduler))
        _AWAITING[engine.optimizer] = _Awaiting(stood, moved_by_the_schedule(engine), saved)


def follow_a_loop(engine: Engine) -> None:
    """Give the groups the rates of the checkpoint, where a loop has loaded the scheduler's state itself since a load.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not, before its next step.
    """
    awaiting = _AWAITING.pop(engine.optimizer, None)
    if awaiting is None or engine.lr_scheduler is None:
        return
    loaded = stands_at(behind_proxy(engine.lr_scheduler)) != awaiting.stood
    if not loaded or moved_by_the_schedule(engine) != awaiting.left:  # a loop that sets rates itself knows them
        return
    moved = _moved_by(engine.lr_scheduler)
    for group, values in zip(engine.optimizer.param_groups, awaiting.saved, strict=True):
        for name in group.keys() & values.keys() & moved:
            group[name] = _of_the_kind(group[name], values[name])


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
        rates = _last_rates(scheduler, groups)
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


def _last_rates(scheduler: Any, groups: int) -> list[float] | None:
    """What torch's schedulers keep as the rates that they gave last; None where a state has no such numbers."""
    state = scheduler.state_dict()
    last = state.get("_last_lr") if isinstance(state, Mapping) else None
    try:
        rates = [float(rate) for rate in last] if last is not None and not isinstance(last, str | Mapping) else []
    except (TypeError, ValueError):  # a name that a scheduler of one's own uses for something else
        return None
    return rates if len(rates) == groups else None
