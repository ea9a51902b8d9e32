"""The LR schedule in a checkpoint: what a save keeps of it, and the rates that an engine goes on with behind a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ds_parity.engine.internals.rates_behind_loads import (
    follow_the_schedule,
    kind_of_schedule,
    moved_by_the_schedule,
    state_in_checkpoint,
    state_of_schedule,
    warn_of_another_schedule,
)
from ds_parity.engine.internals.surface import Engine

# Under these names of our state.
_RATES: Final = "schedule"  # what schedulers keep in the groups of the optimizer, such as the rate of each
_KIND: Final = "scheduler"  # the class of the scheduler, by its name
_STATE: Final = "scheduler_state"  # what can be compared of the scheduler's own


def kept_of_schedule(engine: Engine, scheduler: Any) -> dict[str, Any]:
    """Return what our state has of the schedule.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        scheduler: its own, or one that was taken away from it; None for none.
    """
    return {
        _RATES: moved_by_the_schedule(engine),
        _KIND: kind_of_schedule(engine),
        _STATE: state_of_schedule(scheduler),
    }


def go_on_with_schedule(
    engine: Engine,
    before: Sequence[Mapping[str, Any]],
    ours: Mapping[str, Any],
    state: Mapping[str, Any],
    awaits: Callable[[Any, Any], None],
    *,
    scheduler: bool,
    optimizer: bool,
) -> None:
    """Give the optimizer's groups the rates that are due behind a load, and wait for a loop that loads the rest itself.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not, behind the load.
        before: what `moved_by_the_schedule` was in front of it, with what other schedulers move.
        ours: our state in the checkpoint; empty in one of bare DeepSpeed.
        state: the client state, which has it.
        awaits: is given the scheduler's state and the rates where the checkpoint was saved, each None where nothing
            tells, if the scheduler's state was not loaded.
        scheduler: the scheduler's state was loaded.
        optimizer: the optimizer's states were loaded.
    """
    there = ours.get(_RATES) or (moved_by_the_schedule(engine) if optimizer else None)
    follow_the_schedule(engine, before, ours.get(_RATES), scheduler=scheduler, optimizer=optimizer)
    if scheduler:
        warn_of_another_schedule(engine, ours.get(_KIND))
    else:
        awaits(ours.get(_STATE) or state_in_checkpoint(state), there)
