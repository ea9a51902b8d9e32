"""Saving and loading with DeepSpeed's checkpoints, which keep the window's state: between windows only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ds_parity.engine import loading
from ds_parity.engine.driver import Driver
from ds_parity.engine.half_loaded import HALF_WAY, is_whole, refuse_half_loaded
from ds_parity.engine.internals.broadcast import any_shape_is_gathered
from ds_parity.engine.internals.checkpoints import (
    COUNTS,
    NAMES,
    has_experts,
    keep_loss_scale,
    loads_universal_weights_alone,
    loss_scale,
    own_clipping,
    read,
    stepped_by_place,
    weights_of,
    without_deepspeeds,
)
from ds_parity.engine.internals.empty_partitions import empty_partitions
from ds_parity.engine.internals.frozen_since import without_copies
from ds_parity.engine.internals.identity import identities
from ds_parity.engine.internals.literal_paths import literal_paths
from ds_parity.engine.internals.model_parts import divided_by_mpu, number_of_parts
from ds_parity.engine.internals.older_checkpoints import forget_sparse_names
from ds_parity.engine.internals.rates_behind_loads import moved_by_the_schedule
from ds_parity.engine.internals.sequence_checkpoints import whole_on_each_rank
from ds_parity.engine.internals.swapped import refuse_swapped
from ds_parity.engine.internals.tied_since import refuse_parted, refusing_to_tie
from ds_parity.engine.internals.universal import load_untrained, refuse_left_over
from ds_parity.engine.internals.unstepped import (
    loaded_as_frozen,
    refuse_doubtful_owners,
    refuse_to_leave_out,
    saved_as_frozen,
)
from ds_parity.engine.kept_schedules import go_on_with_schedule, kept_of_schedule
from ds_parity.engine.kept_states import (
    NAMES_OF_STATES,
    kept,
    of_this_optimizer,
    refuse_states_of_others,
    refuse_universal_in_turns,
    saved_in_fp16,
)
from ds_parity.engine.members import MEMBERS, members, refuse_other_members
from ds_parity.engine.ranks.agreement import naming_lost_ranks
from ds_parity.engine.ranks.wire import RESUMES
from ds_parity.engine.saving import IDENTITY, KEY, Saving, agreed, write
from ds_parity.engine.unloadable import explained
from ds_parity.errors import CheckpointError

_LOG = logging.getLogger("ds_parity")
_SETTINGS = ("count", "lr_progress")
_NAMES_IN_GROUPS: Final = "names_in_groups"
_GRAD_SCALER: Final = "grad_scaler"
"""Under this name of our state: that of the GradScaler of `torch_autocast` in fp16."""
# By which load_checkpoint() is asked for a part.
_PART = (("load_optimizer_states", False), ("load_module_only", True))


def save(driver: Driver, saving: Saving, client_state: Any) -> Any:
    """Save a checkpoint, as `ParityEngine.save_checkpoint` says; return what DeepSpeed returns.

    Args:
        driver: whose engine is saved.
        saving: what is saved, as this rank asks for it.
        client_state: the caller's own values; None for none.
    """
    with naming_lost_ranks("save_checkpoint()"):
        state = with_window(driver, client_state, saving)
        driver.adapter.kept.note_use()
        with whole_on_each_rank(driver.engine), saved_as_frozen(driver.engine, _stepped(driver)):
            return write(driver.adapter, saving, state, driver.say_saved)


def load(driver: Driver, load_dir: str, tag: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Load a checkpoint, as `ParityEngine.load_checkpoint` says; return what DeepSpeed returns.

    Args:
        driver: whose engine is loaded.
        load_dir: as in DeepSpeed.
        tag: likewise.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
    """
    with naming_lost_ranks("load_checkpoint()"):
        before, there = driver.state.half_loaded, _refuse_to_begin(driver, load_dir, tag, options)
        driver.state.half_loaded = str(load_dir) if there else before
        driver.boundary.follow_a_loop(saves=True)  # what stands there now is what this load may leave
        rates, scale = moved_by_the_schedule(driver.engine, whatever_moves=True), loss_scale(driver.engine)
        path, state = _loaded_by_all(driver, load_dir, tag, options)
    if path is None:
        driver.state.half_loaded = before
        # Nothing was loaded, so the open window goes on as it was.
        return path, state
    # What a rank can't go on from may be its own affair: an order of groups, a trace that it can't open again.
    with naming_lost_ranks("load_checkpoint()"):
        with driver.telling_of_load(RESUMES):
            _go_on(driver, load_dir, dict(state or {}), options, rates, scale)
        driver.say_resumed()
    # A part that is loaded over another leaves what the other was.
    driver.state.half_loaded = None if is_whole(driver.engine, options) else before
    return path, state


def _go_on(
    driver: Driver, load_dir: str, state: dict[str, Any], options: Mapping[str, Any], rates: Any, scale: Any
) -> None:
    """Go on from what was loaded, with the window's counts, the schedule and the scale of then.

    Args:
        driver: whose engine has loaded.
        load_dir: the folder.
        state: the client state that was saved.
        options: of the load.
        rates: as `moved_by_the_schedule` returned them before the load.
        scale: the loss scale before it.
    """
    ours = state.get(KEY, {})
    refuse_universal_in_turns(driver.engine, load_dir, ours)
    fp16 = saved_in_fp16(ours, state)
    if fp16 is False or not driver.engine.fp16_enabled():
        keep_loss_scale(driver.engine, scale)
    driver.abandon()
    driver.adapter.forget_copies()
    forget_sparse_names(driver.engine)
    if options["load_module_only"]:
        return
    if not options["load_optimizer_states"]:
        driver.adapter.refresh()
    scheduler, optimizer = options["load_lr_scheduler_states"], options["load_optimizer_states"]
    if optimizer:
        named = options["load_module_strict"] and options["custom_load_fn"] is None
        refuse_states_of_others(driver.engine, ours, driver.adapter.groups(), named=named, fp16=fp16)
        refuse_other_members(driver.engine, ours, driver.adapter.groups_of_optimizer(), named=named)
        if not named:
            driver.adapter.show_stepped_weights()
    resume(driver, state, scheduler=scheduler, optimizer=optimizer)
    awaits = driver.boundary.await_a_loop
    go_on_with_schedule(driver.engine, rates, ours, state, awaits, scheduler=scheduler, optimizer=optimizer)
    driver.boundary.has_loaded()


def _refuse_to_begin(driver: Driver, load_dir: str, tag: Any, options: Mapping[str, Any]) -> bool:
    """Raise before anything is loaded, on every rank alike; return whether there is something to load."""
    engine = driver.engine
    # Experts have other names in a checkpoint than in the model of one rank.
    stepped = [] if has_experts(engine) else _stepped(driver)
    said = driver.say_to_load(loading.asked(engine, load_dir, tag, options, stepped))
    there = loading.refuse_unlike_loads(load_dir, said)
    driver.refuse_loading()
    driver.adapter.refuse_loading_over_copies()
    if there:
        refuse_swapped(engine, f"load_checkpoint({load_dir!r})", "Nothing was loaded")
    if options["load_module_only"]:
        refuse_module_alone(driver)
    if not options["load_optimizer_states"]:
        _refuse_weights_of_parts_alone(driver)
    refuse_a_part_of_universal(engine, options)
    _refuse_universal_of_parts(engine, load_dir)
    if there and options["load_module_strict"]:
        refuse_doubtful_owners(engine, _stepped(driver))
    driver.adapter.kept.note_use()
    return there


def _loaded_by_all(driver: Driver, load_dir: str, tag: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    engine = driver.engine
    # At the end of these loads DeepSpeed gathers parameters, or a function of the caller's may talk to other ranks, who
    # may wait for this one there, and hear of an error once they come out, or this one ends.
    gathers = int(engine.zero_optimization_stage()) == 3 or engine.load_universal_checkpoint()
    stepped, strict, custom = _stepped(driver), options["load_module_strict"], bool(options["custom_load_fn"])
    alone = not (gathers or custom)
    with (
        driver.telling_of_load(at_once=not alone),
        explained(driver, load_dir, tag),
        naming_lost_ranks("load_checkpoint()"),
        of_this_optimizer(engine, load_dir),
        _as_configured(engine, tag),
        any_shape_is_gathered(),
        literal_paths(),
        empty_partitions(engine),
        loaded_as_frozen(engine, stepped, strict=strict, custom=custom),
        without_copies(engine, strict=strict, custom=custom),
        stepped_by_place(engine, stepped, named=strict or custom),
        refusing_to_tie(engine, custom=custom),
        identities(engine) as files,
    ):
        path, state = engine.load_checkpoint(load_dir, tag, **options)
        if path is not None and engine.load_universal_checkpoint():
            refuse_left_over(engine, path)
            refuse_parted(engine, read(Path(path)))
            load_untrained(engine, path, stepped, strict=strict)
    said = loading.loaded(engine, (state or {}).get(KEY, {}), files)
    loading.refuse_mixture(load_dir, driver.say_loaded(said, found=path is not None))
    return path, state


def _stepped(driver: Driver) -> list[Any]:
    """The model's parameters that the optimizer steps."""
    return list(chain.from_iterable(driver.adapter.groups()))


@contextmanager
def _as_configured(engine: Any, tag: Any) -> Iterator[None]:
    with own_clipping(engine), weights_of(tag, engine), whole_on_each_rank(engine):
        yield


def with_window(driver: Driver, client_state: Any, saving: Saving) -> dict[str, Any]:
    """Return the client state with the window's beside it.

    All ranks meet here, so that one that saves alone is not left waiting in DeepSpeed.

    Args:
        driver: whose window it is.
        client_state: the caller's own values; None for none.
        saving: what is saved.

    Raises:
        CheckpointError: a window is open, a load has ended half way, `own_values` refuses the client state, or
            `refuse_to_leave_out` what is left out.
        RankDesyncError: not every rank saves, or not all of them the same.
    """
    try:
        refuse_swapped(driver.engine, "save_checkpoint()", "Nothing was written")
        refuse_half_loaded(driver.state.half_loaded, "save_checkpoint()")
        client_state = own_values(driver.engine, client_state, driver.ledger.state())
        if saving.without_frozen:
            refuse_to_leave_out(driver.engine, _stepped(driver))
        driver.boundary.follow_a_loop(saves=True)
        settings = {name: getattr(driver.settings, name) for name in _SETTINGS}
        ours = {**settings, "groups": _groups(driver), **kept(driver.engine, driver.adapter.groups())}
        ours[_NAMES_IN_GROUPS] = [sorted(group) for group in driver.engine.optimizer.param_groups]
        ours[MEMBERS] = members(driver.engine, driver.adapter.groups_of_optimizer())
        ours |= kept_of_schedule(driver.engine, driver.boundary.scheduler())
        if (scaler := driver.adapter.grad_scaler()) is not None:
            ours[_GRAD_SCALER] = scaler.state_dict()
    except Exception as error:
        driver.refuse_saving(error)
        raise
    window = driver.ledger.window
    passes = driver.passes_pending()
    if passes:
        units = window.closes_at - window.opened_at
        where = "" if driver.settings.by_caller else f" (at {units} {driver.settings.count}s)"
        pending = f"{window.rollouts} rollouts of {passes} passes are pending"
        if not window.passes:
            pending = f"{passes} passes of another rank are pending"
        raise CheckpointError(
            f"save_checkpoint() inside window {window.index}: {pending}, and DeepSpeed doesn't save partial gradients; "
            f"save after the step() that closes the window{where}, or call finish() first"
        )
    identity = agreed(driver.say_to_save(saving))
    return {**client_state, KEY: {**driver.ledger.state(), **ours, IDENTITY: identity}}


def own_values(engine: Any, client_state: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller's own of a client state is: one that was loaded has DeepSpeed's values of then in it.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        client_state: as it was given; None for none.
        ours: what is saved beside it, by which that of an earlier checkpoint is known.

    Raises:
        CheckpointError: it is no mapping, or has a value of the caller's own under our name, or DeepSpeed's.
    """
    client_state = {} if client_state is None else client_state
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"save_checkpoint(client_state={client_state!r}): must be a dict, beside whose values the state of the "
            'windows is saved; write for example {"own": ...}'
        )
    # What load_checkpoint() returned holds our state of then, and is often saved again with more in it.
    given = client_state.get(KEY)
    known = isinstance(given, dict) and set(ours) - {"last_total", NAMES_OF_STATES} <= set(given)
    if KEY in client_state and not known:
        raise CheckpointError(
            f"save_checkpoint(): client_state[{KEY!r}] is {given!r}: the state of the windows is saved there, and "
            "would replace it; give it another name"
        )
    own = without_deepspeeds(client_state)
    for name in sorted(NAMES & own.keys()):
        its_own = name in COUNTS and isinstance(own[name], int) and own[name] == getattr(engine, name, None)
        if not its_own:
            raise CheckpointError(
                f"save_checkpoint(): client_state[{name!r}] is of {type(own[name]).__name__}: DeepSpeed saves its own "
                "under this name, and the value would replace it; give it another name"
            )
    return own


def refuse_module_alone(driver: Driver) -> None:
    """Raise CheckpointError for `load_module_only` on ZeRO 3.

    DeepSpeed 0.19.8 returns the path there and loads nothing (tools/deepspeed_faults/module_only_zero3.py).
    """
    if driver.engine.zero_optimization_stage() == 3:
        raise CheckpointError(
            "load_checkpoint(load_module_only=True) on ZeRO stage 3: DeepSpeed loads nothing there, because the "
            "weights are in the optimizer's files; leave load_module_only out and give load_optimizer_states=False and "
            "load_lr_scheduler_states=False, which loads the weights and the counts"
        )


def _refuse_weights_of_parts_alone(driver: Driver) -> None:
    """Raise CheckpointError where DeepSpeed counts the files of all ranks, and expects those of one that divides it.

    It makes the weights of the optimizer's files then (utils/zero_to_fp32.py, get_checkpoint_files; 0.19.8).
    """
    engine = driver.engine
    if engine.zero_optimization_stage() == 3 and (size := number_of_parts(engine)) > 1:
        divided = f"tensor_parallel.autotp_size = {size}" if engine.autotp_size() > 1 else f"an mpu of {size} parts"
        raise CheckpointError(
            f"load_checkpoint(load_optimizer_states=False) on ZeRO stage 3 with {divided}: DeepSpeed can't read the "
            "weights of a divided model alone there; load the optimizer's states, too, or use ZeRO stage 0 to 2"
        )


def _refuse_universal_of_parts(engine: Any, load_dir: str) -> None:
    """Raise CheckpointError for a universal checkpoint with an mpu: conversions know no parts but those of AutoTP."""
    if engine.load_universal_checkpoint() and divided_by_mpu(engine):
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}) of a universal checkpoint with an mpu that divides the model: DeepSpeed's "
            "conversion knows nothing of its parts (checkpoint/ds_to_universal.py). Nothing was loaded; load the "
            "checkpoint as it was saved, on as many data-parallel ranks"
        )


def refuse_a_part_of_universal(engine: Any, options: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a part of a universal checkpoint is asked for, and DeepSpeed would load all of it.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        options: the arguments of DeepSpeed's `load_checkpoint`, by their names.
    """
    if not engine.load_universal_checkpoint() or loads_universal_weights_alone(engine):
        return
    asked = (f"{name}={value}" for name, value in _PART if bool(options[name]) is value)
    flag = next(asked, None)
    if flag is not None:
        raise CheckpointError(
            f"load_checkpoint({flag}) on ZeRO stage {int(engine.zero_optimization_stage())}, with "
            "load_universal: this DeepSpeed loads the optimizer's states of a universal checkpoint all the same; leave "
            "the argument out, or load the weights alone into the model before initialize() (zero_to_fp32.py beside "
            "the checkpoint that was converted makes them)"
        )


def resume(driver: Driver, client_state: dict[str, Any], *, scheduler: bool, optimizer: bool) -> None:
    """Put the window's state back, or what follows of it from a checkpoint of bare DeepSpeed.

    Args:
        driver: whose window it is.
        client_state: as it was loaded.
        scheduler: the LR scheduler was loaded too; else it goes on from where this engine's stands, in a fresh one
            from the start.
        optimizer: the optimizer's states were loaded too. With neither, weights alone begin a run that may count
            towards another target: it starts with an empty window.

    Raises:
        CheckpointError: the checkpoint counted something else, towards another target, or moved its LR otherwise.
    """
    state, of_bare = client_state.get(KEY), driver.boundary.counters.state_of_bare(driver.ledger.rules)
    if state is None:
        _LOG.warning("the checkpoint holds no ds_parity state (bare DeepSpeed wrote it): the window starts fresh")
        state = of_bare
    if lacks := ", ".join(name for name in of_bare if name not in state):
        raise CheckpointError(
            f"the state of ds_parity in the checkpoint has no {lacks}: save_checkpoint() has not written it so; load a "
            f"checkpoint that is as it was saved. {HALF_WAY}"
        )
    if scheduler or optimizer:
        _refuse_other_counting(driver, state)
    elif _counts(state) != _wanted(driver):
        _LOG.warning("the checkpoint counted otherwise, and its weights alone were loaded: the window starts fresh")
        state = of_bare
    if scheduler:
        _refuse_other_progress(driver, state)
    units = driver.boundary.resume_schedule(state["progress_units"], loaded=scheduler)
    state = {**state, "progress_units": units}
    driver.ledger.restore(state)
    driver.boundary.counters.settle(driver.ledger)
    if optimizer and driver.engine.load_universal_checkpoint():
        driver.adapter.repair_universal_checkpoint(state.get("groups", []), state.get(_NAMES_IN_GROUPS, []))
    if optimizer:
        driver.adapter.load_grad_scaler(state.get(_GRAD_SCALER))
    schedule = driver.boundary.schedule()
    if schedule is not None and scheduler:
        schedule.resume_at(driver.ledger.progress)
    for listener in driver.on_resume:
        listener(driver.ledger.window.index)


def _refuse_other_counting(driver: Driver, state: Mapping[str, Any]) -> None:
    saved, wanted = _counts(state), _wanted(driver)
    if saved != wanted:
        raise CheckpointError(
            f"the checkpoint was counting towards a target of {saved[0]} {saved[1]}s, this configuration says "
            f"{wanted[0]} {wanted[1]}s: boundaries and LR would not continue; restore gradient_accumulation_passes, "
            "ds_parity.count and ds_parity.boundary, or begin a run with its weights alone: "
            f"load_optimizer_states=False and load_lr_scheduler_states=False. {HALF_WAY}"
        )


def _counts(state: Mapping[str, Any]) -> tuple[Any, Any]:
    return state["target"], state["count"]


def _wanted(driver: Driver) -> tuple[Any, Any]:
    return driver.ledger.rules.target, driver.settings.count


def _refuse_other_progress(driver: Driver, state: Mapping[str, Any]) -> None:
    # Bare DeepSpeed's steps are nominal steps, so its checkpoints suit both.
    saved, wanted = state.get("lr_progress"), driver.settings.lr_progress
    if saved not in (None, wanted) and driver.engine.lr_scheduler is not None:
        raise CheckpointError(
            f"the checkpoint's ds_parity.lr_progress was {saved!r}, this configuration says {wanted!r}: the LR would "
            f"jump from one place of its schedule to another; write {saved!r}, or give load_lr_scheduler_states=False "
            f"to go on with the schedule of the new engine. {HALF_WAY}"
        )


def _groups(driver: Driver) -> list[dict[str, Any]]:
    # Learning rates, weight decays and the like, which may be tensors, or numpy's numbers.
    kept = (bool, int, float, str, tuple, list, type(None), np.generic, torch.Tensor)
    groups = driver.engine.optimizer.param_groups
    return [{k: v for k, v in group.items() if k != "params" and isinstance(v, kept)} for group in groups]
