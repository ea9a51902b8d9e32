"""What it means where DeepSpeed refuses a checkpoint, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_parity.engine.among_ranks import AmongRanks
from ds_parity.engine.internals.checkpoints import REFUSALS
from ds_parity.errors import CheckpointError

_CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder DIR/TAG "
    "--output_folder DIR/universal"
)


@contextmanager
def explained(driver: AmongRanks, load_dir: str, tag: Any = None) -> Iterator[None]:
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


def _explain_frozen(driver: AmongRanks, load_dir: str, error: KeyError) -> None:
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


def _of_universal(driver: AmongRanks, load_dir: str, said: str) -> CheckpointError:
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
