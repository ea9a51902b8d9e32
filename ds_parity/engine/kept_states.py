"""Whose optimizer states a checkpoint holds: DeepSpeed gives them to whatever lies in their place, without an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ds_parity.engine.half_loaded import HALF_WAY
from ds_parity.engine.internals.checkpoints import (
    CONVERTED,
    dealt_in_turns,
    in_turns,
    kinds_of_optimizer,
    names_of_states,
    parts_of,
    saved_in_parts,
    steps_by,
)
from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

NAMES_OF_STATES = "states"
"""Under this name of the window's state, since checkpoints have it: what the optimizer keeps of a parameter."""

# Under these names of the window's state.
_OWNERS = "states_of"
_TURNS = "round_robin_gradients"
_CONFIG = "ds_config"
_FLAG = TypeAdapter(bool)
# Classes whose states are the same: DeepSpeed puts its own in the place of torch's, with offload for example. Of its
# Adagrad they are others than torch's: `exp_avg_sq` in place of `sum`.
_ALIKE = (
    {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"},
    {"Lion", "FusedLion", "DeepSpeedCPULion"},
    {"Lamb", "FusedLamb", "DeepSpeedCPULamb"},
)


def kept(engine: Engine, groups: Iterable[Iterable[torch.nn.Parameter]]) -> dict[str, Any]:
    """Return what tells whose states an engine's are, as a checkpoint keeps it beside the window's state.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        groups: the parameters of its groups, on ZeRO 3 of its sub-groups.
    """
    return {_TURNS: dealt_in_turns(engine), _OWNERS: _owners(engine, groups), NAMES_OF_STATES: names_of_states(engine)}


def refuse_universal_in_turns(engine: Engine, load_dir: str, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a universal checkpoint was loaded, and parameters are dealt to ranks in turns.

    DeepSpeed's converter cuts the parts of ranks as if parameters lay there in their own order, and so does its load
    (_link_all_hp_params of runtime/zero/stage_1_and_2.py, 0.19.8): weights and moments become those of other
    parameters, without an error.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        load_dir: for the message.
        state: what the checkpoint has of the window, with `kept` of the engine that saved; without it where a release
            of before, or bare DeepSpeed, did.
    """
    if not engine.load_universal_checkpoint():
        return
    # Releases of before kept the setting, also of one rank alone.
    here, there = dealt_in_turns(engine), bool(state.get(_TURNS)) and saved_in_parts(engine) != 1
    if not here and not there:
        return
    where = "the run that saved the checkpoint had" if there else "this configuration has"
    raise CheckpointError(
        f"load_checkpoint({load_dir!r}) with load_universal: {where} zero_optimization.{_TURNS} = true, with which "
        "DeepSpeed converts and loads universal checkpoints wrong: it has given weights and states to other "
        "parameters. Load one that was saved with false, in a configuration that says false. What was saved with true "
        f"can be loaded without conversion, on as many ranks. {HALF_WAY}"
    )


def refuse_states_of_others(
    engine: Engine,
    state: Mapping[str, Any],
    groups: Iterable[Iterable[torch.nn.Parameter]],
    *,
    named: bool,
    fp16: bool | None,
) -> None:
    """Raise CheckpointError where the states that were loaded are those of another optimizer or parameter.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        state: what the checkpoint has of the window, with `kept` of the engine that saved; without it where a release
            of before, or bare DeepSpeed, did.
        groups: the parameters of this engine's groups, on ZeRO 3 of its sub-groups.
        named: parameters have the names here that they had there; else some may have others, in the same places.
        fp16: what `saved_in_fp16` returns.
    """
    _refuse_other_scale(engine, fp16)
    _refuse_other_owners(engine, state.get(_OWNERS, {}), _owners(engine, groups), named=named)
    _refuse_other_turns(engine, state.get(_TURNS))
    if engine.load_universal_checkpoint():
        _refuse_unconverted(engine, state.get(NAMES_OF_STATES, ()))


@contextmanager
def of_this_optimizer(engine: Engine, load_dir: str) -> Iterator[None]:
    """Raise CheckpointError where what is loaded inside leaves groups without a name that the optimizer's step() needs.

    torch takes the groups that were saved in place of its own.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        load_dir: for the message.
    """
    before = [set(group) for group in engine.optimizer.param_groups]
    yield
    needed, groups = steps_by(engine), engine.optimizer.param_groups
    lost = sorted({name for own, group in zip(before, groups, strict=False) for name in own & needed - set(group)})
    if lost:
        raise CheckpointError(
            f"load_checkpoint({load_dir!r}): another optimizer than this engine's saved it: its groups have no "
            f"{', '.join(map(repr, lost))}. Load it with the optimizer that saved it, or with "
            "load_optimizer_states=False; loading ends half way, so start a new engine"
        )


def _owners(engine: Engine, groups: Iterable[Iterable[torch.nn.Parameter]]) -> dict[str, Any]:
    names = {id(parameter): name_of_state(name) for name, parameter in engine.module.named_parameters()}
    return {
        # A subclass has the states of its base: its own steps may differ, and that is the user's choice.
        "optimizer": kinds_of_optimizer(engine),
        "fp16": bool(engine.fp16_enabled()),
        "parameters": [[names.get(id(one), "") for one in group] for group in groups],
    }


def _refuse_other_owners(engine: Engine, saved: Mapping[str, Any], own: Mapping[str, Any], *, named: bool) -> None:
    if not saved:
        return
    if not _related(saved["optimizer"], own["optimizer"]):
        raise CheckpointError(
            f"another optimizer than this engine's {own['optimizer'][0]} saved the checkpoint: "
            f"{saved['optimizer'][0]}, whose states are others. Load it with the optimizer that saved it, or with "
            f"load_optimizer_states=False. {HALF_WAY}"
        )
    there = [[name_of_state(name) for name in group] for group in saved["parameters"]]
    if not engine.load_universal_checkpoint() and (named or _moved(there, own["parameters"])):
        _refuse_other_places(there, own["parameters"])


def saved_in_fp16(state: Mapping[str, Any], client_state: Mapping[str, Any]) -> bool | None:
    """Return whether a checkpoint was saved by an engine that ran in fp16; None where nothing says.

    Args:
        state: as in `refuse_states_of_others`.
        client_state: as it was loaded.
    """
    if owners := state.get(_OWNERS):
        return bool(owners["fp16"])
    # Bare DeepSpeed saves its configuration, as it was given: pydantic takes 1 and "true", too.
    config = client_state.get(_CONFIG)
    if not isinstance(config, Mapping):
        return None
    section = config.get("fp16")
    try:
        return _FLAG.validate_python(section.get("enabled", False)) if isinstance(section, Mapping) else False
    except ValidationError:
        return None


def _refuse_other_scale(engine: Engine, saved: bool | None) -> None:
    own, stage = bool(engine.fp16_enabled()), int(engine.zero_optimization_stage())
    # A universal checkpoint leaves this engine's scale as it is (`keep_loss_scale`).
    if saved in (None, own) or (stage and not own) or (own and engine.load_universal_checkpoint()):
        return
    there, here = ("with" if fp16 else "without" for fp16 in (saved, own))
    raise CheckpointError(
        f"the checkpoint was saved {there} fp16, and this engine runs {here} it: DeepSpeed has put the loss scale "
        "of then in the place of this one's, and steps would be divided by it, or gradients vanish. Load it with "
        f"the fp16 that saved it, or with load_optimizer_states=False. {HALF_WAY}"
    )


def _refuse_other_turns(engine: Engine, saved: bool | None) -> None:
    # One data-parallel rank has the states of all parameters. ZeRO deals them to the ranks of a sequence, too.
    # refuse_universal_in_turns() looks at universal checkpoints.
    wanted = in_turns(engine)
    if saved not in (None, wanted) and parts_of(engine) > 1 and not engine.load_universal_checkpoint():
        raise CheckpointError(
            f"the checkpoint was saved with zero_optimization.{_TURNS} = {str(saved).lower()}, and this configuration "
            f"says {str(wanted).lower()}: parameters lie on other ranks there, and DeepSpeed has given their states to "
            "others without an error; load it with the setting that saved it, or with load_optimizer_states=False. "
            f"{HALF_WAY}"
        )


def _refuse_unconverted(engine: Engine, names: Iterable[str]) -> None:
    lost = sorted(set(names) - CONVERTED)
    if lost:
        raise CheckpointError(
            f"the universal checkpoint has no {', '.join(lost)} of its optimizer ({kinds_of_optimizer(engine)[0]}): "
            "DeepSpeed's conversion keeps step, exp_avg and exp_avg_sq alone, and a step would begin the rest anew, or "
            "raise. Load the checkpoint that was converted, on as many ranks and without load_universal, or begin with "
            f"its weights alone (zero_to_fp32.py beside it makes them). {HALF_WAY}"
        )


def _moved(saved: list[list[str]], own: list[list[str]]) -> bool:
    """Whether states go to others, where parameters may have other names: as many in each group, each in its place."""
    if [len(group) for group in saved] != [len(group) for group in own]:
        return True
    there, here = (
        {name: place for place, name in enumerate(name for group in groups for name in group)}
        for groups in (saved, own)
    )
    return any(here.get(name, place) != place for name, place in there.items())


def _refuse_other_places(saved: list[list[str]], own: list[list[str]]) -> None:
    if saved == own:
        return
    number = next((i for i, (one, other) in enumerate(zip(saved, own, strict=False)) if one != other), None)
    number = min(len(saved), len(own)) if number is None else number
    both = [groups[number] if number < len(groups) else [] for groups in (saved, own)]
    # Long groups may begin alike.
    alike = next((i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other), min(map(len, both)))
    there, here = (
        _in_words(names, alike if all(both) else 0) if number < len(groups) else "not there"
        for names, groups in zip(both, (saved, own), strict=True)
    )
    raise CheckpointError(
        f"the checkpoint's parameter groups are not this engine's: group {number} was {there}, and is {here}. "
        "DeepSpeed has given the states, and weights in fp32, to whatever lies in their place. Load it with the "
        "groups, the order of parameters, the trained parameters, and on ZeRO stage 3 the "
        f"zero_optimization.sub_group_size, that saved it, or with load_optimizer_states=False. {HALF_WAY}"
    )


def _in_words(names: list[str], begin: int) -> str:
    shown = [*(["..."] if begin and names else []), *(names[begin : begin + 3])]
    shown += ["..."] if len(names) > begin + 3 else []
    return f"{', '.join(shown) or 'empty'} ({len(names)} parameter{'s' * (len(names) != 1)})"


def _related(one: list[str], other: list[str]) -> bool:
    alike = [names for names in _ALIKE if names & set(one)]
    return bool(set(one) & set(other)) or any(names & set(other) for names in alike)
