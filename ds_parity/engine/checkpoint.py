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
        CheckpointError: a window is open, or the caller's state already holds our key.
    """
    window = driver.ledger.window
    if window.passes:
        raise CheckpointError(
            f"save_checkpoint() inside window {window.index}: {window.rollouts} rollouts of {window.passes} passes are "
            f"pending, and DeepSpeed doesn't save partial gradients; save after the step() that closes the window "
            f"(at {window.target} {driver.settings.count}s), or call finish() first"
        )
    if _KEY in client_state:
        raise CheckpointError(
            f"client_state has a key {_KEY!r} of its own; that name holds the window's state: rename it"
        )
    return {**client_state, _KEY: {**driver.ledger.state(), "count": driver.settings.count}}


def resume(driver: Driver, client_state: dict[str, Any]) -> None:
    """Put the window's state back.

    Raises:
        CheckpointError: the checkpoint counted something else, or towards another target.
    """
    state = client_state.get(_KEY)
    if state is None:
        _LOG.warning("the checkpoint holds no ds_parity state (bare DeepSpeed wrote it): the window starts fresh")
        return
    saved, wanted = (state["target"], state["count"]), (driver.ledger.rules.target, driver.settings.count)
    if saved != wanted:
        raise CheckpointError(
            f"the checkpoint was counting towards a target of {saved[0]} {saved[1]}s, this configuration says "
            f"{wanted[0]} {wanted[1]}s: boundaries and LR would not continue; restore gradient_accumulation_passes and "
            "ds_parity.count, or start afresh"
        )
    driver.ledger.restore(state)
    driver.engine.global_samples = driver.ledger.rollouts
    if driver.schedule is not None:
        driver.schedule.resume_at(driver.ledger.progress)
