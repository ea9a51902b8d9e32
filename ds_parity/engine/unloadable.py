"""What it means where DeepSpeed refuses a checkpoint, and the way out."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from sys import stdlib_module_names
from traceback import walk_tb
from typing import Any, Protocol

import torch

from ds_parity.engine.internals.checkpoints import OF_WRAPPERS, REFUSALS, parts_of
from ds_parity.engine.internals.model_parts import divided_by_mpu
from ds_parity.engine.internals.schedule import behind_proxy
from ds_parity.errors import CheckpointError, modules_through

_CONVERT = (
    "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder DIR/TAG "
    "--output_folder DIR/universal"
)


_HALF_WAY = "loading ends half way, so start a new engine"
_OF_NONE = "'NoneType'"
_WHOLE = (0,)
_OF_A_BROKEN_FILE = "PytorchStreamReader"  # torch's reader of zip archives
_READER = "torch.serialization"
_OF_DEEPSPEED = "deepspeed."
_LOAD = torch.nn.Module.load_state_dict.__name__  # which calls hooks of a load, and may be the model's own
_OF_ENGINES = ("deepspeed", "ds_parity")
_OF_ZEROS = "filename 'storages' not found"  # torch takes a file of zero bytes for one of its oldest archives
_OF_A_STATE_DICT = "Error(s) in loading state_dict"  # torch's load_state_dict, of names or sizes
_OF_UNIVERSAL = "zero"  # the folder of parameters that ds_to_universal makes
_OF_EXPERTS = "expp_rank_"  # their optimizer's states, of each rank that has some
_OF_A_TAG = ("_model_states.pt", "_optim_states.pt")
# torch's word, DeepSpeed's where other parameters make other parts, and torch's where parts have other sizes.
_OF_GROUPS = ("parameter group", "parameter-alignment layout", "must match the size of tensor")


class Loading(Protocol):
    """Who loads: the bare DeepSpeed engine, of a pipeline or not, and how many data-parallel ranks there are (>= 1)."""

    @property
    def engine(self) -> Any:
        """The engine."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""


@contextmanager
def explained(driver: Loading, load_dir: str, tag: Any = None) -> Iterator[None]:
    """Add the way out to what DeepSpeed says of a checkpoint of other ranks, another stage, another model or release.

    Raises:
        CheckpointError: DeepSpeed refused the checkpoint (a rank that finds no file of its own: by a bare assertion).
    """
    try:
        yield
    except Exception as error:
        explain = next((explain for kinds, explain in _EXPLAINED if isinstance(error, kinds)), None)
        said = _taken_for_plain(driver, load_dir, tag, error) or _by_the_model(load_dir, error)
        if said is None and explain:
            said = explain(driver, load_dir, tag, error)
        if said is None and _inside_the_reader(error):
            said = _unreadable(driver, load_dir, tag, error)
        if said is None:
            raise
        raise said from error


def _inside_the_reader(error: Exception) -> bool:
    # What a damaged file raises there depends on the place of the damage: Unicode, overflow, a key, a folder. A class
    # that is gone, and memory that is not there, are no damage; what others than DeepSpeed read is their own.
    if isinstance(error, AttributeError | ImportError | MemoryError | torch.OutOfMemoryError):
        return False
    callers = [before for before, after in pairwise(modules_through(error)) if after == _READER != before]
    return any(one.startswith(_OF_DEEPSPEED) for one in callers)


def _by_the_model(load_dir: str, error: Exception) -> CheckpointError | None:
    """Return what to say of an error that is raised where the model's own code changes a state before it is loaded."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.split(".")[0] for name in modules_through(error)]
    last = max((at for at, name in enumerate(packages) if name not in stdlib_module_names), default=-1)
    loads = (
        frame.f_code.co_name == _LOAD and package not in _OF_ENGINES
        for frame, package in zip(frames[: last + 1], packages, strict=False)
    )
    if last < 0 or packages[last] in (*_OF_ENGINES, "torch") or not any(loads):
        return None
    code = frames[last].f_code
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): {code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno}), "
        f"a part of the model's load_state_dict(), raised {type(error).__name__}: {error}. Not every load gives it "
        "every key: DeepSpeed takes the trained weights, and with load_universal the frozen ones, from files of their "
        f"own. Let it look whether a key is there before it takes it; {_HALF_WAY}"
    )


def _taken_for_plain(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    folder = None if driver.engine.load_universal_checkpoint() else folder_of(load_dir, tag)
    if folder is None or not (folder / _OF_UNIVERSAL).is_dir():
        return None
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): {folder.name!r} is a universal checkpoint, and this configuration does not "
        f'say so ({type(error).__name__}: {error}). Write "checkpoint": {{"load_universal": true}} into it, or load '
        f"the checkpoint that was converted; {_HALF_WAY}"
    )


def _refused(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError:
    said = f"{type(error).__name__}: {error}" if str(error) else f"a bare {type(error).__name__}"
    universal = driver.engine.load_universal_checkpoint()
    folder = folder_of(load_dir, tag, universal=universal)
    if folder is not None and not folder.is_dir():
        by = f" (by the file {_latest(universal=universal)})" if tag is None else ""
        there = sorted(one.name for one in Path(load_dir).glob("*") if one.is_dir())
        return CheckpointError(
            f"load_checkpoint({load_dir!r}): the tag is {str(folder.relative_to(load_dir))!r}{by}, "
            f"and there is no such folder; give the tag of a checkpoint that was saved there "
            f"({', '.join(there) or 'none was'}). Nothing was loaded"
        )
    if universal:
        return _of_universal(driver, load_dir, said)
    if folder is not None and not any(folder.glob("*model_states.pt")):
        return _broken_off(load_dir, f"there is no *model_states.pt in {folder.name!r} ({said})")
    stage, saved_on = int(driver.engine.zero_optimization_stage()), _saved_on(folder)
    if saved_on is not None and stage not in saved_on:
        return _of_another_stage(stage, saved_on, load_dir, said)
    way_out = (
        "start as many data-parallel ranks as saved it: a conversion knows nothing of the parts of an mpu"
        if divided_by_mpu(driver.engine)
        else f'convert it ({_CONVERT}) and load that with "checkpoint": {{"load_universal": true}} in the configuration'
    )
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) on {driver.ranks} data-parallel ranks: DeepSpeed refused it ({said}). If "
        f"another number of ranks saved it, {way_out}; {_HALF_WAY}"
    )


def _without_a_file(driver: Loading, load_dir: str, _: Any, error: Exception) -> CheckpointError | None:
    if driver.engine.mpu is None:
        return None
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) with an mpu: this DeepSpeed looks for a file of weights of each of its ranks, "
        f"and one was saved ({error}). With sequence parallelism, set engine.mpu to None while a checkpoint is saved "
        f"and while it is loaded, or use DeepSpeed 0.19.8; {_HALF_WAY}"
    )


def _frozen_since(driver: Loading, load_dir: str, _: Any, error: Exception) -> CheckpointError | None:
    # ZeRO 2 and 3 save a copy of each parameter that is frozen then, and look for one of each that is frozen now.
    frozen = {name for name, one in driver.engine.module.named_parameters() if not one.requires_grad}
    missing, stage = frozen.intersection(error.args), int(driver.engine.zero_optimization_stage())
    if not missing:
        return None
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): {missing.pop()} is frozen, and was not when the checkpoint was saved, or "
        f"not there, or had another name, so that DeepSpeed's ZeRO stage {stage} finds no copy of it. Set "
        "requires_grad as it was then, load once more (loading ended half way), and freeze it behind that"
    )


def _no_universal(driver: Loading, load_dir: str, _: Any, error: Exception) -> CheckpointError | None:
    if not driver.engine.load_universal_checkpoint():
        return None
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) with load_universal: DeepSpeed found no universal checkpoint ({error}); "
        f"convert one ({_CONVERT}), or leave load_universal out"
    )


def _of_nothing(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    scheduler = behind_proxy(driver.engine.lr_scheduler)
    if _OF_NONE not in str(error) or not _inside_the_schedule(driver, error):
        return _without_states(driver, load_dir, tag, error)
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the checkpoint has no state of an LR scheduler, and this configuration has "
        f"one ({type(scheduler).__name__}). Load it with load_lr_scheduler_states=False, which begins the schedule "
        f"here, or without a scheduler; {_HALF_WAY}"
    )


def _inside_the_schedule(driver: Loading, error: Exception) -> bool:
    # Where rollouts move the learning rate, the engine's is a proxy, and the scheduler behind it raises.
    scheduler = behind_proxy(driver.engine.lr_scheduler)
    inside = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return scheduler is not None and any(one is scheduler for one in inside)


def _without_states(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    stage = int(driver.engine.zero_optimization_stage())
    if driver.engine.load_universal_checkpoint():
        return _unlike_universal(stage, driver, load_dir, error)
    saved_on = _saved_on(folder_of(load_dir, tag))
    if saved_on is None:
        return None
    if (saved_on != _WHOLE) is bool(stage):
        if isinstance(error, FileNotFoundError):
            return _without_a_part(load_dir, error)
        if stage or _OF_NONE not in str(error):
            return None
        return CheckpointError(
            f"load_checkpoint({load_dir!r}): the checkpoint has no state of the optimizer ({error}), as DeepSpeed "
            f"before 0.18.5 writes none in bf16 on ZeRO 0. Load it with load_optimizer_states=False; {_HALF_WAY}"
        )
    return _of_another_stage(stage, saved_on, load_dir, f"{type(error).__name__}: {error}")


def _of_other_keys(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    if _OF_ZEROS in str(error):
        return _unreadable(driver, load_dir, tag, error)
    if _inside_the_schedule(driver, error):
        return CheckpointError(
            f"load_checkpoint({load_dir!r}): the checkpoint has the state of another LR scheduler than this engine's "
            f"{type(behind_proxy(driver.engine.lr_scheduler)).__name__}, without {error}. Load it with the scheduler "
            f"that saved it, or with load_lr_scheduler_states=False, which begins the schedule here; {_HALF_WAY}"
        )
    # torch's optimizers fill in what a state of older releases lacks, and look for names that another's never had.
    if any(frame.f_code.co_name == "__setstate__" for frame, _ in walk_tb(error.__traceback__)):
        return CheckpointError(
            f"load_checkpoint({load_dir!r}): another optimizer than this engine's saved it: its states have no "
            f"{error}. Load it with the optimizer that saved it, or with load_optimizer_states=False; {_HALF_WAY}"
        )
    # The state of a wrapper (bf16 and fp16) in place of an optimizer's own (fp32), or the reverse.
    if not int(driver.engine.zero_optimization_stage()) and error.args and error.args[0] in OF_WRAPPERS:
        return _of_another_precision(load_dir, error)
    return _frozen_since(driver, load_dir, tag, error)


def _without_a_part(load_dir: str, error: FileNotFoundError) -> CheckpointError | None:
    if _is_of_another_precision(error):
        return _of_another_precision(load_dir, error)
    name = Path(error.filename or "").name
    if not name.endswith(_OF_A_TAG):
        return None
    of_experts = " (if another ep_size saved it, load it with that one)" if _OF_EXPERTS in name else ""
    return _broken_off(load_dir, f"{name} is not there{of_experts}")


def _unlike_universal(stage: int, driver: Loading, load_dir: str, error: Exception) -> CheckpointError | None:
    if not stage:
        return _of_universal(driver, load_dir, f"{type(error).__name__}: {error}")
    # On the other stages, what does not fit a universal checkpoint is the model.
    return _without_a_parameter(load_dir, error) if isinstance(error, FileNotFoundError) else None


def _without_a_parameter(load_dir: str, error: FileNotFoundError) -> CheckpointError:
    missing = Path(error.filename or "")
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the universal checkpoint has no {missing.parent.name}/{missing.name}, as "
        "where its conversion broke off, or where another model, or another set of trained parameters, was saved. "
        f"Convert it anew, into a folder of its own, and load it into the model that saved it; {_HALF_WAY}"
    )


def _of_another_model(load_dir: str, error: Exception) -> CheckpointError:
    said = " ".join(str(error).split())
    of_frozen = (
        " If it was saved with exclude_frozen_parameters=True, load it with load_module_strict=False."
        if "Missing key" in said
        else ""
    )
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the checkpoint is of another model than this engine's ({said}). Load it into "
        f"the model that saved it.{of_frozen} {_HALF_WAY[0].upper()}{_HALF_WAY[1:]}"
    )


def _is_of_another_precision(error: FileNotFoundError) -> bool:
    # Files of one precision are called bf16_zero_pp_rank_..., and those of others zero_pp_rank_...: is all there
    # but with the other name?
    missing = Path(error.filename or "")
    if not missing.name.endswith("_optim_states.pt"):
        return False  # the files of the model, and of experts, have one name
    names = ("bf16_zero_pp_rank_", "zero_pp_rank_")
    there = {name for name in names if any(missing.parent.glob(f"{name}*_optim_states.pt"))}
    return len(there) == 1 and not missing.name.startswith(there.pop())


def _of_another_precision(load_dir: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the checkpoint was saved in another precision (fp32, bf16 or fp16), or on "
        "ZeRO 0 with DeepSpeed's Adam for torch's, or the reverse, and its optimizer states are kept otherwise there "
        f"({type(error).__name__}: {error}). Load it with the bf16, fp16 and optimizer that saved it, or its "
        f"weights alone with load_optimizer_states=False; {_HALF_WAY}"
    )


def _of_other_groups(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    if _OF_A_BROKEN_FILE in str(error):
        return _unreadable(driver, load_dir, tag, error)
    if _OF_A_STATE_DICT in str(error):
        return _of_another_model(load_dir, error)
    if not any(word in str(error) for word in _OF_GROUPS):
        return _no_universal(driver, load_dir, tag, error)
    if other := _of_other_ranks(driver, load_dir, tag, error):
        return other
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the parameter groups of the checkpoint are not this engine's ({error}). "
        "Load it with the groups, the trained parameters, and on ZeRO stage 3 the zero_optimization.sub_group_size, "
        f"that saved it, or with load_optimizer_states=False; {_HALF_WAY}"
    )


def _of_other_ranks(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    # Parts of other ranks have other lengths, whatever the groups are. Each rank saved a file of its own.
    folder = None if driver.engine.load_universal_checkpoint() else folder_of(load_dir, tag)
    files = () if folder is None else folder.glob("*zero_pp_rank_*_optim_states.pt")
    saved = len({one.name.partition("zero_pp_rank_")[2].partition("_")[0] for one in files})
    here = parts_of(driver.engine)
    if saved in (0, here):
        return None
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): {saved} data-parallel rank{'s' * (saved > 1)} saved the checkpoint, and "
        f"{here} load it, with parts of the optimizer's states of another length ({error}). Convert it ({_CONVERT}) "
        f'and load that with "checkpoint": {{"load_universal": true}} in the configuration; {_HALF_WAY}'
    )


def _unreadable(driver: Loading, load_dir: str, _: Any, error: Exception) -> CheckpointError:
    return _broken_off(load_dir, f"a file of it can't be read ({type(error).__name__}: {error})")


def _cut(driver: Loading, load_dir: str, tag: Any, error: Exception) -> CheckpointError | None:
    # torch looks for the end of the archive before the beginning of a file that was cut short.
    invalid = isinstance(error, OSError) and error.errno == errno.EINVAL
    return _unreadable(driver, load_dir, tag, error) if invalid else None


def _broken_off(load_dir: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"load_checkpoint({load_dir!r}): the checkpoint is not whole: {why}, as where its saving broke off, or where "
        f"hosts do not share the folder; load the one before it, by its tag; {_HALF_WAY}"
    )


def _of_another_stage(stage: int, saved_on: tuple[int, ...], load_dir: str, said: str) -> CheckpointError:
    # Only files tell, and those of the other stages are written last.
    broken_off = ", or its saving broke off before the optimizer's files" if saved_on == _WHOLE else ""
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) on ZeRO stage {stage}: the checkpoint was saved on stage "
        f"{' or '.join(map(str, saved_on))}{broken_off}, and its weights or optimizer states are in other files there "
        f"({said}). Load it with the zero_optimization.stage that saved it, or load its weights alone into the model "
        f"before initialize() (zero_to_fp32.py beside it makes them of stages 1 to 3); {_HALF_WAY}"
    )


def _of_universal(driver: Loading, load_dir: str, said: str) -> CheckpointError:
    stage = int(driver.engine.zero_optimization_stage())
    return CheckpointError(
        f"load_checkpoint({load_dir!r}) on ZeRO stage {stage}, with load_universal: DeepSpeed refused it ({said}). It "
        "loads a universal checkpoint on the stage that saved it, where 1 and 2 are alike, and none on stage 0. Set "
        "zero_optimization.stage so, or load the weights alone into the model before initialize() (zero_to_fp32.py "
        "beside the checkpoint makes them). If it is that stage, the tag names no universal checkpoint, or one whose "
        "conversion broke off: convert it anew, or leave load_universal out. Loading ends half way, so start a new "
        "engine"
    )


def tag_of(load_dir: str, tag: Any, *, universal: bool = False) -> str | None:
    """Return the tag that is loaded: the one that is given, or else that of the file `latest`; None without such.

    Args:
        load_dir: as in DeepSpeed.
        tag: likewise.
        universal: universal checkpoints are loaded, which have a file of their own.
    """
    if tag is not None:
        return str(tag)
    latest = Path(load_dir) / _latest(universal=universal)
    return latest.read_text().strip() if latest.is_file() else None


def _latest(*, universal: bool) -> str:
    return "latest_universal" if universal else "latest"


def folder_of(load_dir: str, tag: Any, *, universal: bool = False) -> Path | None:
    """Return the folder of a checkpoint's tag, which need not exist; None where nothing names one."""
    named = tag_of(load_dir, tag, universal=universal)
    return None if named is None else Path(load_dir) / named


def _saved_on(folder: Path | None) -> tuple[int, ...] | None:
    """Return the ZeRO stages that may have saved a checkpoint, by its files; None where there is none."""
    if folder is None or not folder.is_dir():
        return None
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return (3,)
    return (1, 2) if any(folder.glob("*zero_pp_rank_*_optim_states.pt")) else _WHOLE


_EXPLAINED = (
    (REFUSALS, _refused),
    (IndexError, _without_a_file),
    (KeyError, _of_other_keys),
    ((ValueError, RuntimeError), _of_other_groups),
    ((AttributeError, FileNotFoundError, TypeError), _of_nothing),
    ((pickle.UnpicklingError, EOFError), _unreadable),
    (OSError, _cut),
)
