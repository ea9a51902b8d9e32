"""How DeepSpeed refuses a checkpoint, what it leaves to the caller of its save, and what a load may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import getmro
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as of_deepspeed
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from ds_parity.engine.internals.changed_in_state import written_as_they_are
from ds_parity.engine.internals.model_names import is_own_state, name_of_state, names_of_one, with_versions
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter

REFUSALS: tuple[type[Exception], ...] = (ZeRORuntimeException, AssertionError)
"""A checkpoint of another number of ranks: a rank that finds no file of its own raises a bare assertion."""

OF_WRAPPERS: Final = ("dynamic_loss_scale", "param_groups")
"""By name: what the wrapper of bf16 and fp16 on ZeRO 0 saves, and what the optimizer of fp32 does in its place."""

COUNTS: Final = ("global_steps", "global_samples", "skipped_steps")
"""By name: what a checkpoint has of the engine's own attributes of these names."""

NAMES: Final = frozenset(COUNTS) | {
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size"),
    *("buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("sparse_tensor_module_names", "csr_tensor_module_names", "ds_config", "ds_version", "num_experts"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "folding", "ds_autoep_layers", "autoep_layers"),
}
"""What DeepSpeed 0.18.4 to 0.19.8 write beside the client state, which is written over it (runtime/engine.py,
_common_checkpoint_state, _save_checkpoint and _save_moe_checkpoint)."""

_OF_A_CHECKPOINT: Final = {"ds_config", "ds_version"}

_LOADED: Final = frozenset(
    {"module", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
)
_BESIDE_THE_MODEL: Final = {"dp_world_size", "mp_world_size"}


def without_deepspeeds(client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client state without what DeepSpeed has put there while it loaded a checkpoint; any other as it is.

    Most of a checkpoint is returned as its client state. Saved again, it replaces what is true by then, on ZeRO 0 the
    optimizer's states and weights in fp32, too (tools/deepspeed_faults/client_state_again.py); 0.19.8 raises a
    KeyError. What a load puts into the engine (0.18.4 to 0.19.8, _load_checkpoint) is not in what it returns: under
    these names are the caller's own values. A load of the model alone returns all the rest.
    """
    if not client_state.keys() >= _OF_A_CHECKPOINT:
        return dict(client_state)
    returned = NAMES if client_state.keys() >= _BESIDE_THE_MODEL else NAMES - _LOADED
    return {name: value for name, value in client_state.items() if name not in returned}


CONVERTED: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""By name: what a conversion to a universal checkpoint keeps of a parameter's state (checkpoint/ds_to_universal.py,
merge_tp_slices and merge_zero3_slices, 0.19.8)."""

_COLLECT: Final = "get_fp32_state_dict_from_zero_checkpoint"


_WRITING: Final = ("makedirs", "create", "save")
# What makes the files: a state_dict() of an optimizer, a scheduler or a model may raise in them.
_MAKING: Final = ("_save_checkpoint", "_save_zero_checkpoint")
_CLIP: Final = "clip_grad"
_OF_THE_LOSS: Final = ("loss_scaler", "dynamic_loss_scale")
_ALONE: Final = "load_module_checkpoint_state_from_checkpoint_dir_stage3"


def loads_universal_weights_alone(engine: Engine) -> bool:
    """Return whether DeepSpeed can load the weights of a universal checkpoint without the optimizer's states.

    On ZeRO 1 and 2, and on ZeRO 3 before 0.19.3, it loads all whatever the flags say (runtime/engine.py,
    load_checkpoint, and the two _load_universal_checkpoint of runtime/zero, 0.19.8).
    """
    stage = engine.zero_optimization_stage()
    return stage == 0 or (stage == 3 and hasattr(engine.optimizer, _ALONE))


def has_experts(engine: Engine) -> bool:
    """Return whether parameters have names by the rank that has them, as experts do."""
    return engine.has_moe_layers


def read(file: Path, *, kept: bool = False) -> dict[str, Any]:
    """Return what is in a file of a checkpoint.

    Args:
        file: that is read.
        kept: it is given to the model's modules, or to a function of the caller's, which may keep what they get. Else
            tensors stay in the file until they are used, and are gone where it is written again: a process that uses
            one then ends by SIGBUS.
    """
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=not kept)
    return state


def beside_weights(saved: Mapping[str, Any], module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ZeRO 3 has saved of a model beside its weights, by the names in its state.

    DeepSpeed lists one name of a buffer, and in place of a parameter its state has an empty tensor.

    Args:
        saved: what is in its file.
        module: the model that loads.

    Returns:
        Buffers, by all of their names, and what modules save of their own; and what else is there, which hooks of the
        state have made.
    """
    buffers = set(map(name_of_state, saved.get("buffer_names") or ()))
    buffers |= {name_of_state(name) for name, _ in module.named_buffers(remove_duplicate=False)}
    shapes = (*(saved.get("param_shapes") or ()), saved.get("frozen_param_shapes"), saved.get("shared_params"))
    weights = set(map(name_of_state, chain.from_iterable(one or () for one in shapes)))
    state = {name_of_state(name): value for name, value in saved["module"].items()}
    own = {name: value for name, value in state.items() if name in buffers or is_own_state(name)}
    left = {name: value for name, value in state.items() if name not in own.keys() | weights}
    return own, {name: value for name, value in left.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.numel()


@contextmanager
def looked_at(engine: Engine, look: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Return a context in which a function sees what is in the model's file before DeepSpeed loads the model.

    Args:
        engine: a bare DeepSpeed engine, of no pipeline.
        look: may raise, so that nothing is loaded.
    """

    def looking(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            look(checkpoint)
            return load(checkpoint, *args, **kwargs)

        return loaded

    with wrapped(engine, "load_module_state_dict", looking):
        yield


@contextmanager
def stepped_by_place(engine: Engine, stepped: Iterable[Parameter], *, named: bool) -> Iterator[None]:
    """Return a context in which weights that may have other names are those that the checkpoint's optimizer stepped.

    With `load_from_fp32_weights: false` DeepSpeed makes them of the model's own on ZeRO 1 and 2, which it finds by name
    alone: those of the new engine stay then, beside the states of what had their place
    (_restore_from_bit16_weights of runtime/zero/stage_1_and_2.py, 0.19.8).

    Args:
        engine: a bare DeepSpeed engine.
        stepped: the model's parameters that the optimizer steps.
        named: parameters have the names here that they had when they were saved, or a function gives them weights.
    """
    if named:
        yield
        return
    renamed = False

    def note(checkpoint: Mapping[str, Any]) -> None:
        nonlocal renamed
        # What is frozen has no masters: the checkpoint may lack it.
        own = {id(one) for one in stepped}
        names = (name_of_state(name) for name, one in engine.module.named_parameters() if id(one) in own)
        renamed = any(name not in checkpoint["module"] for name in names)

    def deciding(configured: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: renamed or configured()

    with looked_at(engine, note), wrapped(engine, "zero_load_from_fp32_weights", deciding):
        yield


@contextmanager
def own_clipping(engine: Any) -> Iterator[None]:
    """Return a context in which a load leaves the configuration's `gradient_clipping` as it is.

    Wrappers save the norm by which they clip and load it again, without a word (_load_global_state of
    runtime/zero/stage_1_and_2.py, load_state_dict of runtime/fp16/fused_optimizer.py and runtime/bf16_optimizer.py,
    0.19.8; tools/deepspeed_faults/clips_as_saved.py), so that one number in the configuration has an effect on ZeRO 3
    and none on ZeRO 1 and 2.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    kept = getattr(engine.optimizer, _CLIP, None)
    try:
        yield
    finally:
        if kept is not None:
            setattr(engine.optimizer, _CLIP, kept)


def loss_scale(engine: Any) -> dict[str, Any]:
    """Return what a wrapper scales losses by, for `keep_loss_scale`.

    Args:
        engine: a bare DeepSpeed engine.
    """
    return {name: getattr(engine.optimizer, name) for name in _OF_THE_LOSS if hasattr(engine.optimizer, name)}


def keep_loss_scale(engine: Any, before: Mapping[str, Any]) -> None:
    """Let a wrapper scale losses as before a load.

    It loads what was saved (_load_global_state of runtime/zero/stage_1_and_2.py and stage3.py, 0.19.8). Of a run
    without fp16 that is a scale of 1, which never grows, and in fp16 gradients would vanish. Of a run in fp16 it is one
    that grows in fp32, too, where a step at which it does is half as large as it should be.

    Args:
        engine: a bare DeepSpeed engine.
        before: what `loss_scale` was in front of the load.
    """
    for name, value in before.items():
        setattr(engine.optimizer, name, value)


@contextmanager
def going_on(engine: Any) -> Iterator[list[Exception]]:
    """Return a context in which a save comes to its end where this rank can't write, and the list of what it raises.

    The other ranks wait for this one in barriers of save_checkpoint (runtime/engine.py, 0.19.8), and nothing can be
    said to them before. What is left out behind the first error would belong to a checkpoint that is not whole. What
    is raised beside these functions (the copy of NVMe offload, what ZeRO 3 does before and behind) goes its way.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    errors: list[Exception] = []

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                errors.append(error)
            return None

        return tried

    def trying(function: Callable[..., Any]) -> Callable[..., Any]:
        tried = kept(function)
        return lambda *args, **kwargs: None if errors else tried(*args, **kwargs)

    with ExitStack() as stack:
        for name in _WRITING:
            stack.enter_context(wrapped(engine.checkpoint_engine, name, trying))
        # Others of a decoupled engine wait for this rank in its commit.
        if not engine.checkpoint_engine.is_decoupled():
            stack.enter_context(wrapped(engine.checkpoint_engine, "commit", trying))
        stack.enter_context(wrapped(engine, "_copy_recovery_script", trying))
        for name in _MAKING:
            stack.enter_context(wrapped(engine, name, kept))
        yield errors


def steps_by(engine: Engine) -> set[str]:
    """Return the names that the optimizer's step() looks up in its groups, where others may have put more."""
    return set(getattr(engine.basic_optimizer, "defaults", ()))


def kinds_of_optimizer(engine: Engine) -> list[str]:
    """Return the names of the class of the optimizer that is stepped, and of its bases but the last."""
    bases = getmro(type(engine.basic_optimizer))
    return [kind.__name__ for kind in bases if kind not in (torch.optim.Optimizer, object)] or [bases[0].__name__]


def names_of_states(engine: Engine) -> list[str]:
    """Return what the optimizer keeps of a parameter, by name: `step`, `exp_avg`; none before its first step."""
    states = getattr(engine.basic_optimizer, "state", {})
    return sorted({name for one in states.values() for name in one if isinstance(name, str)})


def in_turns(engine: Any) -> bool:
    """Return whether ranks are given the parameters in turns (`round_robin_gradients`), on ZeRO 1 and 2.

    Each rank's part of the optimizer's state is one flat tensor, which DeepSpeed loads whatever lies where
    (_load_legacy_checkpoint of runtime/zero/stage_1_and_2.py, 0.19.8): with the other setting, moments and weights in
    fp32 become those of other parameters, without an error (tools/deepspeed_faults/states_of_others.py). What it saves
    of their places does not tell the two apart.
    """
    return bool(getattr(engine.optimizer, "round_robin_gradients", False))


def dealt_in_turns(engine: Any) -> bool:
    """Return whether `in_turns`, and there are data-parallel ranks (those of a sequence among them) to deal to.

    A column of a pipeline, and the only group of tensor-parallel ranks, has all parameters in their order.
    """
    return in_turns(engine) and parts_of(engine) > 1


def parts_of(engine: Any) -> int:
    """Return among how many ranks ZeRO parts the optimizer's states (>= 1)."""
    group = getattr(engine.optimizer, "dp_process_group", None)
    return 1 if group is None else dist.get_world_size(group)


def rank_in_parts(engine: Any) -> int:
    """Return this rank's number among those that ZeRO parts the optimizer's states among: it is in its files' names."""
    return dist.get_rank(getattr(engine.optimizer, "dp_process_group", None)) if dist.is_initialized() else 0


def saved_in_parts(engine: Any) -> int | None:
    """Return among how many ranks the states of the checkpoint that was loaded were parted; None where nothing says."""
    return getattr(engine, "loaded_checkpoint_dp_world_size", None)


@contextmanager
def weights_of(tag: Any, engine: Engine) -> Iterator[None]:
    """Return a context in which an engine on ZeRO 3 that loads weights alone loads those of a tag.

    DeepSpeed collects those of `latest`, whatever tag it was given (runtime/engine.py, _load_checkpoint, in every
    release from 0.16.9 to 0.19.8; tools/deepspeed_faults/latest_weights_zero3.py). Where it loads a universal
    checkpoint it collects them, too, and makes no use of them: the weights come from other files. So nothing is
    collected there, and no `latest` is needed.

    Args:
        tag: of the checkpoint; None for `latest`.
        engine: a bare DeepSpeed engine.
    """
    universal = engine.load_universal_checkpoint()
    made_by_hooks: list[set[str]] = []  # once something was collected
    if engine.zero_optimization_stage() != 3:
        yield
        return

    def tagged(collect: Callable[..., Any]) -> Callable[..., Any]:
        def collected(folder: str, given: Any = None, *args: Any, **kwargs: Any) -> Any:
            if universal:
                return {}
            given = kwargs.pop("tag", given)
            chosen = tag if given is None else given
            chosen = (Path(folder) / "latest").read_text().strip() if chosen is None else str(chosen)
            whole, made = _with_state_of_rank(engine, folder, chosen, collect(folder, chosen, *args, **kwargs))
            made_by_hooks.append(made)
            return whole

        return collected

    with (
        wrapped(of_deepspeed, _COLLECT, tagged),
        written_as_they_are(engine, lambda: made_by_hooks[-1] if made_by_hooks else None),
    ):
        yield


def _with_state_of_rank(
    engine: Engine, folder: str, tag: str, weights: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return whole weights by their names in the model's state, with all else that this rank has saved of it.

    The second are the names of what hooks of the state have made.

    DeepSpeed collects buffers of the first rank, in fp32, and nothing of what a module keeps of its own
    (utils/zero_to_fp32.py, 0.19.8).
    """
    file = Path(engine._get_ckpt_name(folder, tag))
    saved = read(file, kept=True) if file.is_file() else {"module": {}}
    own, made = beside_weights(saved, engine.module)
    found = made | {name_of_state(name): value for name, value in weights.items()} | own
    for names in names_of_one(engine.module):  # of a module that has several, one is collected
        known = next((name for name in names if name in found), None)
        if known is not None:
            found = {**dict.fromkeys(names, found[known]), **found}
    return with_versions(found, saved["module"], engine.module), set(made)
