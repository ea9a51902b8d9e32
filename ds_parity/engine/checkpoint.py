"""The window's state in DeepSpeed's checkpoints: taken and put back between windows only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_parity.engine.driver import Driver
from ds_parity.engine.internals.checkpoints import REFUSALS
from ds_parity.errors import CheckpointError

_LOG = logging.getLogger("ds_parity")
_KEY = "ds_parity"
_SETTINGS = ("count", "lr_progress")
_CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder DIR/TAG "
    "--output_folder DIR/universal"
)


def with_window(driver: Driver, client_state: Any) -> dict[str, Any]:
    """Return the client state with the window's beside it.

    All ranks meet here, so that one that saves alone is not left waiting in DeepSpeed.

    Raises:
        CheckpointError: a window is open, or the client state is no mapping, or has a value of the caller's own under
            our name.
        RankDesyncError: not every rank saves.
    """
    client_state = {} if client_state is None else client_state
    try:
        _refuse_what_would_be_replaced(driver, client_state)
    except CheckpointError as error:
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
    driver.meet_to_save()
    settings = {name: getattr(driver.settings, name) for name in _SETTINGS}
    return {**client_state, _KEY: {**driver.ledger.state(), **settings, "groups": _groups(driver)}}


def _refuse_what_would_be_replaced(driver: Driver, client_state: Any) -> None:
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"save_checkpoint(client_state={client_state!r}): must be a dict, beside whose values the state of the "
            'windows is saved; write for example {"own": ...}'
        )
    # What load_checkpoint() returned holds our state of then, and is often saved again with more in it.
    given = client_state.get(_KEY)
    ours = isinstance(given, dict) and set(driver.ledger.state()) - {"last_total"} <= set(given)
    if _KEY in client_state and not ours:
        raise CheckpointError(
            f"save_checkpoint(): client_state[{_KEY!r}] is {given!r}: the state of the windows is saved there, and "
            "would replace it; give it another name"
        )


def name_latest(save_dir: str, tag: str) -> None:
    """Let `latest` name a checkpoint, on the first rank; every rank calls, behind DeepSpeed's save_checkpoint.

    DeepSpeed 0.19.8 writes it when the first rank has its own files, others may still be at theirs, and empties it
    first (tools/deepspeed_faults/latest_before_all_files.py). The barrier that all files wait for ends its
    save_checkpoint.
    """
    if dist.get_rank() == 0:
        latest = Path(save_dir) / "latest"
        # A rename changes the file at once; a run that is killed here finds the old name or the new one.
        beside = latest.with_name("latest.new")
        beside.write_text(tag)
        beside.replace(latest)
    dist.barrier()


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


@contextmanager
def explained(driver: Driver, load_dir: str, tag: Any = None) -> Iterator[None]:
    """Add the way out to what DeepSpeed says where a ZeRO checkpoint meets another number of ranks, or another stage.

    Raises:
        CheckpointError: DeepSpeed refused the checkpoint (a rank that finds no file of its own: by a bare assertion).
    """
    try:
        yield
    except REFUSALS as error:
        said = f"{type(error).__name__}: {error}" if str(error) else f"a bare {type(error).__name__}"
        if driver.engine.load_universal_checkpoint():
            raise _of_universal(driver, load_dir, said) from error
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}) on {driver.ranks} data-parallel ranks: DeepSpeed refused it ({said}). If "
            f"another number of ranks saved it, convert it ({_CONVERT}) and load that with "
            '"checkpoint": {"load_universal": true} in the configuration; loading ends half way, so start a new engine'
        ) from error
    except KeyError as error:
        _explain_frozen(driver, load_dir, error)
        raise
    except ValueError as error:
        if not driver.engine.load_universal_checkpoint():
            raise
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}) with load_universal: DeepSpeed found no universal checkpoint ({error}); "
            f"convert one ({_CONVERT}), or leave load_universal out"
        ) from error
    except (AttributeError, FileNotFoundError) as error:
        stage = int(driver.engine.zero_optimization_stage())
        if driver.engine.load_universal_checkpoint() and stage == 0:
            raise _of_universal(driver, load_dir, f"{type(error).__name__}: {error}") from error
        # On the other stages, what does not fit a universal checkpoint is the model.
        if driver.engine.load_universal_checkpoint() or _partitioned(load_dir, tag) in (None, bool(stage)):
            raise
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}) on ZeRO stage {stage}: the checkpoint was saved "
            f"{'on stage 0' if stage else 'on stage 1, 2 or 3'}, and its optimizer states are in other files there "
            f"({type(error).__name__}: {error}). Load it with the zero_optimization.stage that saved it, or load "
            "its weights alone into the model before initialize() (zero_to_fp32.py beside it makes them of stages 1 to "
            "3); loading ends half way, so start a new engine"
        ) from error


def _explain_frozen(driver: Driver, load_dir: str, error: KeyError) -> None:
    """Raise CheckpointError where DeepSpeed looks for a frozen parameter that was trained when it was saved."""
    # ZeRO 2 and 3 save a copy of each parameter that is frozen then, and look for one of each that is frozen now.
    frozen = {name for name, one in driver.engine.module.named_parameters() if not one.requires_grad}
    missing = frozen.intersection(error.args)
    if missing:
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}): {missing.pop()} is frozen, and was not when the checkpoint was saved, so "
            f"that DeepSpeed's ZeRO stage {int(driver.engine.zero_optimization_stage())} finds no copy of it there. "
            "Set requires_grad as it was then, load once more (loading ended half way), and freeze it behind that"
        ) from error


def _of_universal(driver: Driver, load_dir: str, said: str) -> CheckpointError:
    stage = int(driver.engine.zero_optimization_stage())
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) on ZeRO stage {stage}, with load_universal: DeepSpeed refused it ({said}). It "
        "loads a universal checkpoint on the stage that saved it, where 1 and 2 are alike, and none on stage 0. Set "
        "zero_optimization.stage so, or load the weights alone into the model before initialize() (zero_to_fp32.py "
        "beside the checkpoint makes them). If it is that stage, the tag names no universal checkpoint: load that, or "
        "leave load_universal out. Loading ends half way, so start a new engine"
    )


def _partitioned(load_dir: str, tag: Any) -> bool | None:
    """Whether ZeRO has partitioned the optimizer states of a checkpoint; None where there is no checkpoint."""
    latest = Path(load_dir) / "latest"
    if tag is None:
        tag = latest.read_text().strip() if latest.exists() else None
    folder = Path(load_dir) / str(tag)
    return any(folder.glob("*zero_pp_rank_*_optim_states.pt")) if folder.is_dir() else None


def resume(driver: Driver, client_state: dict[str, Any], *, scheduler: bool, optimizer: bool) -> None:
    """Put the window's state back, or what follows of it from a checkpoint of bare DeepSpeed.

    Args:
        driver: whose window it is.
        client_state: as it was loaded.
        scheduler: the LR scheduler was loaded too; else it goes on from where this engine's stands, in a fresh one
            from the start.
        optimizer: the optimizer's states were loaded too.

    Raises:
        CheckpointError: the checkpoint counted something else, towards another target, or moved its LR otherwise.
    """
    state = client_state.get(_KEY)
    if state is None:
        _LOG.warning("the checkpoint holds no ds_parity state (bare DeepSpeed wrote it): the window starts fresh")
        state = driver.boundary.counters.state_of_bare(driver.ledger.rules)
    _refuse_other_counting(driver, state)
    if scheduler:
        _refuse_other_progress(driver, state)
    else:
        state = {**state, "progress_units": driver.ledger.progress.units}
    driver.ledger.restore(state)
    driver.boundary.counters.settle(driver.ledger)
    if optimizer and driver.engine.load_universal_checkpoint():
        driver.adapter.repair_universal_checkpoint(state.get("groups", []))
    schedule = driver.boundary.schedule()
    if schedule is not None and scheduler:
        schedule.resume_at(driver.ledger.progress)
    for listener in driver.on_resume:
        listener(driver.ledger.window.index)


def _refuse_other_counting(driver: Driver, state: dict[str, Any]) -> None:
    saved, wanted = (state["target"], state["count"]), (driver.ledger.rules.target, driver.settings.count)
    if saved != wanted:
        raise CheckpointError(
            f"the checkpoint was counting towards a target of {saved[0]} {saved[1]}s, this configuration says "
            f"{wanted[0]} {wanted[1]}s: boundaries and LR would not continue; restore gradient_accumulation_passes, "
            "ds_parity.count and ds_parity.boundary, or start afresh"
        )


def _refuse_other_progress(driver: Driver, state: dict[str, Any]) -> None:
    # Bare DeepSpeed's steps are nominal steps, so its checkpoints suit both.
    saved, wanted = state.get("lr_progress"), driver.settings.lr_progress
    if saved not in (None, wanted) and driver.engine.lr_scheduler is not None:
        raise CheckpointError(
            f"the checkpoint's ds_parity.lr_progress was {saved!r}, this configuration says {wanted!r}: the LR would "
            f"jump from one place of its schedule to another; write {saved!r}, or give load_lr_scheduler_states=False "
            "to go on with the schedule of this engine"
        )


def _groups(driver: Driver) -> list[dict[str, Any]]:
    # Learning rates, weight decays and the like; tensors stay with the optimizer's own state.
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = driver.engine.optimizer.param_groups
    return [{k: v for k, v in group.items() if k != "params" and isinstance(v, plain)} for group in groups]
