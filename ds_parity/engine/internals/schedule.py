"""Putting a scheduler at a position (`lr_progress: rollout`), and what its `step()` is given elsewhere."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import wrapt
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import ConfigError, WindowError
from ds_parity.window import Progress

_LOG = logging.getLogger("ds_parity")

# DeepSpeed's schedulers are functions of `last_batch_iteration`, which stands one behind the steps taken
# (lr_schedules.py, 0.19.8: -1 before the first).
_BY_ITERATION = tuple(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES)

# What torch's schedulers (OneCycleLR, CyclicLR, SWALR) keep in the optimizer's groups, and what some of them cycle.
_OF_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_CYCLED = ("betas", "momentum")

# Megatron's schedulers count samples, and DeepSpeed gives them its batch size: `step(increment)`.
_SAMPLES: Final = "increment"


def refuse_unfit(scheduler: Any, given: Any, doing: str) -> None:
    """Raise WindowError where a scheduler's `step()` can't be called with what a loop has given for it.

    DeepSpeed would call it with its batch size then, whatever the argument means there (engine.py, `_take_model_step`,
    0.19.8), so that ReduceLROnPlateau takes the batch size for the metric, and StepLR for the epoch.

    Args:
        scheduler: the engine's; None for none.
        given: `lr_kwargs` of the loop.
        doing: what the loop has called, for the message ("step() in window 3").
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise WindowError(
            f"{doing} was given lr_kwargs={given!r}: must be a mapping of names to values for the scheduler's step(); "
            "give lr_kwargs={'metrics': ...}, or leave it out"
        )
    # What stands at a position takes anything, and has no use for it.
    scheduler, given = behind_proxy(scheduler), dict(given or {})
    if scheduler is None or _fits(scheduler, (), given):
        return
    name = type(scheduler).__name__
    if given:
        takes = ", ".join(inspect.signature(scheduler.step).parameters) or "nothing"
        raise WindowError(
            f"{doing} was given lr_kwargs with {', '.join(sorted(given))}, but {name}.step() takes {takes}: DeepSpeed "
            "would give it the batch size in their place; leave lr_kwargs out, or give what the scheduler takes"
        )
    if not (wanted := needed_by(scheduler)):
        return
    raise WindowError(
        f"{doing} was given no lr_kwargs, but {name}.step() needs {', '.join(wanted)}: DeepSpeed would give it the "
        f"batch size in its place; give step(lr_kwargs={{{wanted[0]!r}: ...}}) the same value on every rank, where the "
        "data end inside a window finish(lr_kwargs=...) too, behind passes(..., finish=False) (with terms of several "
        "units, which take whole windows there, choose ds_parity.last_window 'drop'); where a framework calls "
        "step(), as the Trainer does with lr_scheduler_type='reduce_lr_on_plateau', choose one that counts steps"
    )


def behind_proxy(scheduler: Any) -> Any:
    """Return the scheduler that a `RolloutSchedule` stands for; any other, or None, as it is."""
    return scheduler.__wrapped__ if isinstance(scheduler, RolloutSchedule) else scheduler


def _fits(scheduler: Any, args: Any, given: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(scheduler.step).bind(*args, **given)
    except TypeError:
        return False
    except ValueError:  # it has none that can be read
        return True
    return True


def needed_by(scheduler: Any) -> list[str]:
    """Return the names of what a scheduler's `step()` must be given by a loop.

    Args:
        scheduler: the engine's; None for none.
    """
    if scheduler is None or _fits(scheduler, (), {}):
        return []
    parameters = inspect.signature(scheduler.step).parameters.values()
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in any_number]
    return [] if needed == [_SAMPLES] else needed


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


def _of_the_kind(own: Any, value: Any) -> Any:
    """A value as the group has it: torch's optimizers step by a rate that is a tensor in some of their ways alone."""
    if isinstance(own, torch.Tensor):
        return own.fill_(float(value))
    return float(value) if isinstance(value, torch.Tensor) else value


def _due(scheduler: Any, saved: Sequence[Mapping[str, Any]] | None, groups: int) -> Sequence[Mapping[str, Any]]:
    """What the groups have where a scheduler stands that was loaded; nothing of one that has not begun."""
    known = [{}] * groups if saved is None or len(saved) != groups else saved
    if isinstance(scheduler, _BY_ITERATION):
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


class _Loud(wrapt.ObjectProxy[Any]):
    """A scheduler whose own TypeError is seen: DeepSpeed takes every one for an argument that is missing."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step it.

        Raises:
            WindowError: it has raised a TypeError, though it takes these arguments.
        """
        scheduler = self.__wrapped__
        try:
            return scheduler.step(*args, **kwargs)
        except TypeError as error:
            # One that hands on what it is given may hand it to Megatron's.
            if not _fits(scheduler, args, kwargs) or f"argument: {_SAMPLES!r}" in str(error):
                raise
            raise WindowError(
                f"step() of the scheduler {type(behind_proxy(scheduler)).__name__} has raised TypeError: {error}. "
                "DeepSpeed would step it once more, with the batch size as its argument. The weights have been "
                "stepped, and the learning rates have not: mend the scheduler, or give it what it needs with "
                "step(lr_kwargs=...), and load a checkpoint into a new engine"
            ) from error


@contextmanager
def failing_loudly(engine: Engine) -> Iterator[None]:
    """Let a TypeError that the scheduler raises inside DeepSpeed's step be seen.

    Raises:
        WindowError: it has raised one.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        yield
        return
    engine.lr_scheduler = _Loud(scheduler)
    try:
        yield
    finally:
        engine.lr_scheduler = scheduler


class RolloutSchedule(wrapt.ObjectProxy[Any]):
    """A scheduler whose `step()` goes to the nominal progress in place of one step on; all else is the scheduler's.

    A function of its step (all of DeepSpeed's, LambdaLR) stands at the fractional position; any other takes the whole
    steps that were completed, and the remainder is carried. Between two steps, the LR of DeepSpeed's schedulers lies
    between theirs.

    Raises:
        ConfigError: the scheduler moves by a metric, not by steps.
    """

    def __init__(self, scheduler: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ds_parity.lr_progress is 'rollout' but the scheduler is ReduceLROnPlateau, which moves by a metric "
                "and has no position to stand at; choose 'optimizer_step', or a scheduler that counts steps"
            )
        if not _fits(scheduler, (), {}):
            raise ConfigError(
                f"ds_parity.lr_progress is 'rollout' but the scheduler is {type(scheduler).__name__}, whose step() "
                f"needs {', '.join(needed_by(scheduler)) or _SAMPLES} and has no position to stand at; choose "
                "'optimizer_step', or a scheduler that counts steps"
            )
        super().__init__(scheduler)
        self._self_progress: Progress | None = None
        self._self_taken = 0

    def advance_to(self, progress: Progress | None) -> None:
        """Say where the next `step()` goes; None: nowhere, because it is the loop's own."""
        self._self_progress = progress

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go to the position last given to `advance_to`; what is passed here is the caller's step count, and unused.

        A loop that steps the engine's scheduler itself finds it there already, or at its start.
        """
        if self._self_progress is not None:
            self._place(self._self_progress)

    def goes_on_from_its_own_step(self) -> None:
        """Take the steps that it stands at as taken: it was put in another's place in the middle of a run."""
        own = getattr(self.__wrapped__, "last_epoch", 0)
        self._self_taken = max(0, int(own)) if isinstance(own, int | float) else 0

    def resume_at(self, progress: Progress) -> None:
        """Take `progress` as reached already: the scheduler's own state came from a checkpoint."""
        self._self_taken = progress.whole
        if self._self_progress is not None:
            self._self_progress = progress

    def _place(self, progress: Progress) -> None:
        scheduler = self.__wrapped__
        # A whole position stays an int, as DeepSpeed itself passes it.
        nominal: float = progress.whole if progress.nominal.is_integer() else progress.nominal
        if isinstance(scheduler, _BY_ITERATION):
            scheduler.step(_within(scheduler, nominal - 1))
        elif isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = nominal - 1  # type: ignore[assignment]  # fractional, on purpose
            scheduler.step()
        else:
            # Any other scheduler only knows steps, so it takes those that became whole since the last.
            for _ in range(progress.whole - self._self_taken):
                scheduler.step()
        self._self_taken = progress.whole


def _within(scheduler: Any, iteration: float) -> float:
    """Return the iteration itself, or a whole one beside it where the LR would leave the range of the two beside it.

    DeepSpeed's formulas are written for whole steps. Its warm-up by the logarithm is at the maximum a step before the
    warm-up ends (`_get_gamma`: log(N) / log(N) at N - 1) and would go on rising; OneCycle would begin a second cycle
    between the last step of its cycle and the first of its decay.
    """
    below = math.floor(iteration)
    if iteration == below or iteration < 0:  # before the first step there is the LR at the start alone
        return iteration
    here, first, last = (_rates_at(scheduler, at) for at in (iteration, below, below + 1))
    if all(min(ends) <= rate <= max(ends) for rate, *ends in zip(here, first, last, strict=True)):
        return iteration
    # That one whose LR is nearer, so that a warm-up never falls back; the one that was reached where both are as near.
    return below if _apart(here, first) <= _apart(here, last) else below + 1


def _rates_at(scheduler: Any, iteration: float) -> list[float]:
    scheduler.step(iteration)
    rates: list[float] = scheduler.get_lr()
    return rates


def _apart(rates: list[float], others: list[float]) -> float:
    return sum(abs(one - other) for one, other in zip(rates, others, strict=True))
