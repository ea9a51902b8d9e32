"""Checkpoints of a pipeline: DeepSpeed's own, and whose states each stage has saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from ds_parity.engine import kept_states, loading
from ds_parity.engine.checkpoint import own_values, refuse_a_part_of_universal
from ds_parity.engine.internals import universal_stages
from ds_parity.engine.internals.adapter import choose
from ds_parity.engine.internals.checkpoints import has_experts, keep_loss_scale, loss_scale, own_clipping
from ds_parity.engine.internals.empty_partitions import empty_partitions
from ds_parity.engine.internals.identity import identities
from ds_parity.engine.internals.literal_paths import literal_paths
from ds_parity.engine.internals.rates_behind_loads import (
    Standing,
    await_a_loop,
    follow_a_loop,
    moved_by_the_schedule,
)
from ds_parity.engine.internals.stages import as_it_was_saved, layer_without_a_file
from ds_parity.engine.kept_schedules import go_on_with_schedule, kept_of_schedule
from ds_parity.engine.members import MEMBERS, members, of_all_stages, refuse_other_names, refuse_other_pipeline
from ds_parity.engine.ranks.agreement import in_short
from ds_parity.engine.saving import IDENTITY, KEY, Gather, Saving, agreed, write
from ds_parity.engine.unloadable import explained, folder_of, tag_of
from ds_parity.errors import CheckpointError, RankDesyncError

_USUAL = ("lr", "weight_decay", "betas", "eps", "momentum")
_OWN = ("params", "step")  # some optimizers count their steps there
_TOLD = (str, bytes, int, complex, range, Decimal, Enum, Fraction, torch.dtype, torch.device)
_SETTINGS = "settings"
"""Under this name of a stage's state: learning rate, weight decay and the like of its parameter groups."""


@dataclass(frozen=True)
class _Loading:
    """As `unloadable.Loading` says."""

    engine: Any
    ranks: int


def with_states(engine: Any, client_state: Any) -> dict[str, Any]:
    """Return the client state with whose states this stage has.

    Args:
        engine: DeepSpeed's PipelineEngine.
        client_state: the caller's own values; None for none.

    Raises:
        CheckpointError: `own_values` refuses the client state.
    """
    adapter = choose(engine)
    follow_a_loop(engine, saves=True)
    ours = kept_states.kept(engine, adapter.groups())
    # Pipelines have saved these from the first, so that an earlier state is known by them.
    own = own_values(engine, client_state, ours)
    ours[MEMBERS] = members(engine, adapter.groups_of_optimizer(), as_named=True)
    ours |= {universal_stages.TIED: universal_stages.places(engine.module), _SETTINGS: _settings(engine)}
    ours |= kept_of_schedule(engine, engine.lr_scheduler)
    return {**own, KEY: ours}


def save(engine: Any, saving: Saving, state: Mapping[str, Any], before: Gather, behind: Gather) -> Any:
    """Save a checkpoint; return what DeepSpeed returns.

    Args:
        engine: DeepSpeed's PipelineEngine.
        saving: what is saved.
        state: what `with_states` has returned.
        before: gathers a value of every rank that comes to save.
        behind: the same of those that have saved.

    Raises:
        CheckpointError: on every rank, where one could not write its files.
        RankDesyncError: not every rank saves, or not all of them the same.
    """
    ours = {**state[KEY], IDENTITY: agreed(before(saving))}
    return write(choose(engine), saving, {**state, KEY: ours}, behind)


def refuse_to_begin(engine: Any, load_dir: str, tag: Any, options: Mapping[str, Any], before: Gather) -> bool:
    """Return whether there is a folder to load; raise where ranks are about to load different things.

    Args:
        engine: DeepSpeed's PipelineEngine.
        load_dir: as in DeepSpeed.
        tag: likewise.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
        before: gathers a value of every rank that comes to load.

    Raises:
        CheckpointError: on every rank, where one finds no folder of the tag, or may not look into it, or a universal
            checkpoint lacks something of its stage, or has one value in the place of several stages'.
        RankDesyncError: not every rank loads, or not all of them the same.
    """
    adapter = choose(engine)
    stepped, strict = list(chain.from_iterable(adapter.groups())), options["load_module_strict"]
    universal, as_it_is = partial(universal_stages.refused, strict=strict), universal_stages.refused_as_it_is
    asking: Callable[..., str | None] = universal if engine.load_universal_checkpoint() else as_it_is
    refused = partial(asking, engine.module, stepped=stepped, saved_places=_places_of_tied)
    asked = loading.asked(engine, load_dir, tag, options, refused=refused)
    own = universal_stages.own_parts(engine.module, stepped)
    said = before((asked, members(engine, adapter.groups_of_optimizer(), as_named=True), own))
    there = loading.refuse_unlike_loads(load_dir, [one for one, _, _ in said])
    if there and engine.load_universal_checkpoint():
        refuse_a_part_of_universal(engine, options)
        if why := universal_stages.of_several_stages(one for _, _, one in said):
            raise CheckpointError(f"load_checkpoint({load_dir!r}), with load_universal: {why}")
        if not has_experts(engine):
            _refuse_another_pipeline(load_dir, tag, of_all_stages(one for _, one, _ in said))
    return there


def _places_of_tied(stage: Mapping[str, Any]) -> Any:
    return stage.get(KEY, {}).get(universal_stages.TIED)


def _refuse_another_pipeline(load_dir: str, tag: Any, here: list[dict[str, Any]]) -> None:
    """Raise where a universal checkpoint is of other parameters or groups; `here`: those of all stages that load it."""
    named = tag_of(load_dir, tag, universal=True)
    folder = None if named is None else folder_of(load_dir, named)
    if folder is None or not (folder / "zero").is_dir():
        return
    saved = universal_stages.states(folder)
    _refuse_apart(load_dir, [state.get(KEY, {}).get(_SETTINGS) for state in saved])
    there = [state[KEY][MEMBERS] for state in saved if MEMBERS in state.get(KEY, {})]
    if len(there) == len(saved):
        refuse_other_pipeline(of_all_stages(there), here)
    else:
        refuse_other_names({one.name for one in (folder / "zero").iterdir() if one.is_dir()}, here)


def _settings(engine: Any) -> list[dict[str, str]]:
    """What the optimizer steps each parameter group by, in words that can be compared.

    A universal load copies each key of a group but its parameters. What is not named by the optimizer, and is no number
    is a label, such as the names of parameters.
    """
    named = {*_USUAL, *getattr(getattr(engine.optimizer, "optimizer", engine.optimizer), "defaults", ())}
    return [
        {
            name: _in_words(value)
            for name, value in sorted(group.items())
            if name not in _OWN and (name in named or _of_numbers(value))
        }
        for group in engine.optimizer.param_groups
    ]


def _of_numbers(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_of_numbers, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (Real, Decimal)) or getattr(value, "size", None) == 1  # an array of numpy


def _in_words(value: Any) -> str:
    """A number as it counts, whatever its type; of a function or an object its kind: it is another in each process."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        # With its kind, which says as much as its values (no field can be called so); with slots it has no `__dict__`.
        value = {"class": type(value), **{one.name: getattr(value, one.name, None) for one in fields(value)}}
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_in_words(key)}: {_in_words(one)}' for key, one in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_in_words, value)))}}}"
    if isinstance(value, (Real, Decimal)) and not isinstance(value, Enum):
        with suppress(OverflowError, ValueError):
            if (number := float(value)) == value or not isinstance(value, int):
                return repr(number + 0.0)  # -0.0 is 0.0
    if value is None or isinstance(value, _TOLD):
        return repr(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def _refuse_apart(load_dir: str, stages: list[list[dict[str, str]] | None]) -> None:
    """Raise where stages have saved other settings: a universal load gives all of them those of the first.

    It does so in DeepSpeed too (tools/deepspeed_faults/settings_of_stages.py, 0.19.8).
    """
    first = stages[0] if stages else None
    for stage, settings in enumerate(stages):
        if first is None or settings is None or settings == first:
            continue
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}), with load_universal: {_apart(stage, settings, first)}, and DeepSpeed "
            "gives each stage those of the first. Nothing was loaded; load the checkpoint that was converted, with as "
            "many stages and columns, and without load_universal"
        )


def _apart(stage: int, settings: list[dict[str, str]], first: list[dict[str, str]]) -> str:
    """Which settings of a stage are not those of the first one, in words."""
    if len(settings) != len(first):
        return f"stage {stage} was saved with {len(settings)} parameter groups, and stage 0 with {len(first)}"
    group, ours, others = next((at, a, b) for at, (a, b) in enumerate(zip(settings, first, strict=True)) if a != b)
    names = [name for name in sorted(ours.keys() | others.keys()) if ours.get(name) != others.get(name)]
    told = (", ".join(f"{name} {one.get(name, 'missing')}" for name in names) for one in (ours, others))
    return f"parameter group {group} of stage {stage} was saved with {next(told)}, that of stage 0 with {next(told)}"


def load(
    engine: Any, load_dir: str, tag: Any, options: Mapping[str, Any], behind: Gather, standing: Standing
) -> tuple[Any, Any]:
    """Load a checkpoint; return what DeepSpeed returns.

    Args:
        engine: DeepSpeed's PipelineEngine.
        load_dir: as in DeepSpeed.
        tag: likewise.
        options: all other arguments of DeepSpeed's `load_checkpoint`, by their names.
        behind: gathers a value of every rank that has loaded.
        standing: of its scheduler.

    Raises:
        CheckpointError: on every rank, where one can't go on from it: DeepSpeed refused the checkpoint, or its states
            are those of another optimizer, or of other parameters.
        RankDesyncError: not every rank has loaded, or not all of them the same.
    """
    with identities(engine) as files:
        path, state, error = _loaded(engine, load_dir, tag, options, standing)
    ours = loading.loaded(engine, (state or {}).get(KEY, {}), files)
    # Each stage has parameters and files of its own, so what doesn't fit one may fit another.
    try:
        said = behind((error and in_short(error), ours))
    except (RankDesyncError, RuntimeError):
        if error is None:
            raise
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(said):
        if other is not None:
            raise CheckpointError(f"load_checkpoint({load_dir!r}): rank {rank} has refused it: {other}")
    loading.refuse_mixture(load_dir, [one for _, one in said])
    if path is not None and engine.load_universal_checkpoint():
        universal_stages.share_tied_weights(engine.module)
    return path, state


def _go_on_with_schedule(
    engine: Any, rates: Any, state: Mapping[str, Any], options: Mapping[str, Any], standing: Standing
) -> None:
    own = engine.lr_scheduler

    def awaits(saved: Any, there: Any) -> None:
        known = standing.tells_its_rates(own)
        await_a_loop(engine, own, standing.has_left(own), saved, there, tells_its_rates=known)

    scheduler, optimizer = options["load_lr_scheduler_states"], options["load_optimizer_states"]
    go_on_with_schedule(engine, rates, state.get(KEY, {}), state, awaits, scheduler=scheduler, optimizer=optimizer)


def _loaded(
    engine: Any, load_dir: str, tag: Any, options: Mapping[str, Any], standing: Standing
) -> tuple[Any, Any, Exception | None]:
    """Return what DeepSpeed returns, and the error where this stage can't go on from it, so that others are told."""
    try:
        with (
            explained(_Loading(engine, engine.dp_world_size), load_dir, tag),
            kept_states.of_this_optimizer(engine, load_dir),
            as_it_was_saved(engine),
            own_clipping(engine),
            literal_paths(),
            empty_partitions(engine),
        ):
            follow_a_loop(engine, saves=True)
            rates, scale = moved_by_the_schedule(engine, whatever_moves=True), loss_scale(engine)
            path, state = engine.load_checkpoint(load_dir, tag, **options)
            keep_loss_scale(engine, scale)  # one of fp16, which no pipeline runs in here, would grow
            if path is not None and engine.load_universal_checkpoint():
                stepped = chain.from_iterable(choose(engine).groups())
                strict = options["load_module_strict"]
                universal_stages.load_layers(engine.module, Path(path).parent, stepped, strict=strict)
        if path is not None and not options["load_module_only"]:
            _go_on_with_schedule(engine, rates, state or {}, options, standing)
        if path is not None:
            kept_states.refuse_universal_in_turns(engine, load_dir, (state or {}).get(KEY, {}))
        if path is not None and options["load_optimizer_states"] and not options["load_module_only"]:
            adapter, named, ours = choose(engine), options["load_module_strict"], (state or {}).get(KEY, {})
            # Pipelines have no fp16.
            kept_states.refuse_states_of_others(engine, ours, adapter.groups(), named=named, fp16=None)
            if not named:
                adapter.show_stepped_weights()
    except CheckpointError as error:
        other = _of_another_topology(engine, load_dir, tag, error) or _without_a_layer(engine, load_dir, tag, error)
        return None, None, other or error
    except Exception as error:  # whatever it is, the other stages are told
        return None, None, error
    return path, state, None


def _of_another_topology(engine: Any, load_dir: str, tag: Any, error: CheckpointError) -> CheckpointError | None:
    """Return what to say of a checkpoint that other stages or columns saved; None where they are no reason."""
    if engine.load_universal_checkpoint():
        return None
    stages, columns = engine.grid.pipe_parallel_size, engine.dp_world_size
    folder = folder_of(load_dir, tag)
    files = sorted(folder.glob("mp_rank_*_model_states.pt")) if folder is not None else []
    if not files:
        return None
    try:
        saved = torch.load(files[0], map_location="cpu", weights_only=False).get("dp_world_size")
    except Exception:  # what can't be read has been refused for that
        return None
    # torch's own optimizer (ZeRO stage 0 in fp32) is saved whole by every column.
    columns_matter = not isinstance(engine.optimizer, torch.optim.Optimizer)
    if saved is None or (len(files) == stages and not (columns_matter and saved != columns)):
        return None
    other = CheckpointError(
        f"load_checkpoint({load_dir!r}): {_counted(len(files), saved)} saved the checkpoint, and this pipeline has "
        f"{_counted(stages, columns)}, on which its optimizer states don't lie as they did. Load it with as many "
        "stages and columns, or its weights alone with load_optimizer_states=False; loading ends half way, so start a "
        f"new engine ({error})"
    )
    other.__cause__ = error
    return other


def _without_a_layer(engine: Any, load_dir: str, tag: Any, error: CheckpointError) -> CheckpointError | None:
    """Return what to say where this stage finds no file of one of its layers; None where it has all."""
    folder = None if engine.load_universal_checkpoint() else folder_of(load_dir, tag)  # that has other files
    lost = layer_without_a_file(engine.module, folder) if folder is not None and folder.is_dir() else None
    if lost is None:
        return None
    other = CheckpointError(
        f"load_checkpoint({load_dir!r}): the checkpoint is not whole: it has no file of a layer: {lost}, as where its "
        "saving broke off, where files were lost, or where hosts do not share the folder; load the one before it, by "
        f"its tag; loading ends half way, so start a new engine ({error})"
    )
    other.__cause__ = error
    return other


def _counted(stages: int, columns: int) -> str:
    return f"{stages} stage{'s' * (stages > 1)} of {columns} column{'s' * (columns > 1)} (data-parallel ranks)"
