"""The window's state in DeepSpeed's checkpoints: taken and put back between windows only."""

from __future__ import annotations

import logging
from typing import Any

from ds_parity.engine.driver import Driver
from ds_parity.errors import CheckpointError

_LOG = logging.getLogger("ds_parity")
_KEY = "ds_parity"


def with_window(driver: Driver, client_state: dict[str, Any]) -> dict[str, Any]:
    """Return the client state with the window's beside it.

    Raises:
        CheckpointError: a window is open.
    """
    window = driver.ledger.window
    if window.passes:
        raise CheckpointError(
            f"save_checkpoint() inside window {window.index}: {window.rollouts} rollouts of {window.passes} passes are "
            f"pending, and DeepSpeed doesn't save partial gradients; save after the step() that closes the window "
            f"(at {window.target} {driver.settings.count}s), or call finish() first"
        )
    return {**client_state, _KEY: {**driver.ledger.state(), "count": driver.settings.count}}


def resume(driver: Driver, client_state: dict[str, Any], *, scheduler: bool) -> None:
    """Put the window's state back, or what can be told of it from a checkpoint of bare DeepSpeed.

    Args:
        driver: whose window it is.
        client_state: as it was loaded.
        scheduler: the LR scheduler was loaded too; else nominal progress starts anew with it.

    Raises:
        CheckpointError: the checkpoint counted something else, or towards another target.
    """
    state = client_state.get(_KEY)
    if state is None:
        _LOG.warning("the checkpoint holds no ds_parity state (bare DeepSpeed wrote it): the window starts fresh")
        state = _of_bare(driver)
    saved, wanted = (state["target"], state["count"]), (driver.ledger.rules.target, driver.settings.count)
    if saved != wanted:
        raise CheckpointError(
            f"the checkpoint was counting towards a target of {saved[0]} {saved[1]}s, this configuration says "
            f"{wanted[0]} {wanted[1]}s: boundaries and LR would not continue; restore gradient_accumulation_passes and "
            "ds_parity.count, or start afresh"
        )
    driver.ledger.restore(state if scheduler else {**state, "progress_units": 0})
    driver.counters.settle(driver.ledger)
    if driver.schedule is not None:
        driver.schedule.resume_at(driver.ledger.progress)


def _of_bare(driver: Driver) -> dict[str, Any]:
    # Every step that bare DeepSpeed applied is one nominal step: its scheduler stands there.
    engine, rules = driver.engine, driver.ledger.rules
    applied = (engine.global_steps - engine.skipped_steps) * rules.target
    return {
        "target": rules.target,
        "count": rules.count,
        "passes": engine.micro_steps,
        "windows": engine.global_steps,
        "consumed": applied,
        "origin": applied,
        "rollouts": engine.global_samples,
        "progress_units": applied,
    }
