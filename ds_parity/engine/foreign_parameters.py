"""Parameters that are given to be trained and are none of the model, and a scheduler of another optimizer.

Nothing would ever train the model's own, or move the rates that they are trained with. And how the parameters lie in
the groups of an optimizer, which must be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from deepspeed.moe.utils import is_moe_param

from ds_parity.engine.internals.group_options import numbers_of
from ds_parity.errors import ConfigError

_WAY_OUT: Final = (
    "Take them from model.parameters(), after the model was copied, wrapped or changed; make a new optimizer in place "
    "of one that another engine had, whose ZeRO has put partitions into it"
)

_NEVER_MOVED: Final = "the learning rates of the engine would never move"


def held(parameters: Any) -> Any:
    """Return `model_parameters` in a form that can be looked at twice: DeepSpeed makes a list of a generator, too.

    So does torch of one that is inside a group, in that group.
    """
    given = list(parameters) if isinstance(parameters, Iterator) else parameters
    for group in given if isinstance(given, list | tuple) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return given


def refuse_foreign_parameters(keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError where an optimizer, or `model_parameters`, has parameters that are not the model's.

    DeepSpeed reduces the gradients of the model's parameters. On ZeRO 0 it steps others without a word: a model beside
    them is not trained, and they differ between ranks. On ZeRO 1 to 3 it ends in a KeyError or an AttributeError.

    Args:
        keywords: of `deepspeed.initialize`.
    """
    model = keywords.get("model")
    if not isinstance(model, torch.nn.Module):
        return
    own = {id(one) for one in model.parameters()}
    given = {
        "optimizer=": getattr(keywords.get("optimizer"), "param_groups", None),
        "model_parameters=": keywords.get("model_parameters"),
    }
    for name, groups in given.items():
        parameters = list(_parameters(groups))
        if name == "optimizer=" and groups is not None and not parameters:
            raise ConfigError(f"optimizer= contains no parameters: nothing would be trained. {_WAY_OUT}")
        foreign = [one for one in parameters if id(one) not in own]
        if foreign:
            raise ConfigError(
                f"{name} contains {len(parameters)} parameters, of which {len(foreign)} (the first of shape "
                f"{tuple(foreign[0].shape)}) are not in the {type(model).__name__} that initialize() is given: the "
                f"model's own would not be trained by them, and these would not be reduced over ranks. {_WAY_OUT}"
            )


def refuse_foreign_scheduler(keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError where a scheduler sets the learning rates of another optimizer than the engine's.

    DeepSpeed steps it without a word: the engine's own rates stay where they are, and if another engine trains with
    that optimizer, its rates move twice as fast.

    Args:
        keywords: of `deepspeed.initialize`. A function that makes a scheduler passes, and so does a scheduler without
            an attribute `optimizer`. So does any beside a function that makes the optimizer, which is not there yet:
            `refuse_foreign_scheduler_made` looks at both.
    """
    scheduler, optimizer = keywords.get("lr_scheduler"), keywords.get("optimizer")
    own = getattr(optimizer, "param_groups", ())
    if optimizer is not None and not own:
        return
    if _moves_another(scheduler, optimizer):
        has = "that initialize() is given" if own else "that DeepSpeed makes of the section `optimizer`"
        raise ConfigError(
            f"lr_scheduler= is {_over_another(scheduler)} than the one {has}: {_NEVER_MOVED}. Build it over the "
            "engine's optimizer, or give a function: lr_scheduler=lambda optimizer: LinearLR(optimizer)"
        )


def refuse_foreign_scheduler_made(keywords: Mapping[str, Any], scheduler: Any, optimizer: Any) -> None:
    """Raise ConfigError where a scheduler, now that the engine is there, sets the rates of another optimizer.

    Args:
        keywords: of `deepspeed.initialize`. Without `lr_scheduler` the scheduler is DeepSpeed's own, and right.
        scheduler: of the engine.
        optimizer: of the engine; the caller's own may be inside of it.
    """
    given = keywords.get("lr_scheduler")
    if given is None or not _moves_another(scheduler, optimizer):
        return
    if scheduler is given:
        wrong = f"is {_over_another(scheduler)} than the one that the function in optimizer= has made"
        way_out = "Give a function here, too"
    else:
        wrong = f"is a function that has made {_over_another(scheduler)} than the one that it was given"
        way_out = "Build it over what the function is given"
    raise ConfigError(
        f"lr_scheduler= {wrong}: {_NEVER_MOVED}. {way_out}: lr_scheduler=lambda optimizer: LinearLR(optimizer)"
    )


def _moves_another(scheduler: Any, optimizer: Any) -> bool:
    another = getattr(scheduler, "optimizer", None)
    moved = getattr(another, "param_groups", None)
    if not moved:
        return False
    # By the groups, because frameworks make an optimizer of another class over the same groups; wrappers may copy them.
    shared = {id(group) for group in moved} & {id(group) for group in getattr(optimizer, "param_groups", ())}
    return not shared and not _inside(another) & _inside(optimizer)


def _over_another(scheduler: Any) -> str:
    return f"a {type(scheduler).__name__} over another optimizer ({type(scheduler.optimizer).__name__})"


def _inside(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer and of those that it wraps."""
    found: dict[int, Any] = {}
    inside = [optimizer]
    while inside:
        one = inside.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            inside += [held for held in getattr(one, "__dict__", {}).values() if _steps(held)]
    return set(found)


def _steps(held: Any) -> bool:
    return hasattr(type(held), "param_groups") or "param_groups" in getattr(held, "__dict__", ())


def groups_handed_over(keywords: Mapping[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters of the optimizer, else those of `model_parameters`, group by group.

    Args:
        keywords: of `deepspeed.initialize`. Parameters without groups are left out, and a group that can be read once
            only is empty here.
    """
    return [list(_parameters([one])) for one in _given(keywords) if isinstance(one, Mapping)]


def handed_over(keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the parameters of the optimizer, else those of `model_parameters`, with groups and without.

    Args:
        keywords: of `deepspeed.initialize`. A group that can be read once only is left out.
    """
    return list(_parameters(_given(keywords)))


def refuse_without_rate(optimizer: Any) -> None:
    """Raise ConfigError where a group of an optimizer has no learning rate: ranks compare rates, and records have them.

    Args:
        optimizer: anything without groups passes.
    """
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        if group.get("lr", 0.0) is None:
            raise ConfigError(
                f"parameter group {number} of {type(optimizer).__name__} has the learning rate None: its step() finds "
                "one that nobody else sees; give it lr= (transformers' Adafactor with relative_step=False)"
            )


def groups_in_words(model: Any, optimizer: Any, groups: Any) -> dict[str, str]:
    """Return where each parameter lies in the optimizer, and what its groups say: all ranks need the same.

    ZeRO cuts each group into parts by places alone, and adds the gradients of one place up over the ranks. Where ranks
    have another order (groups that were made of a `set`, in which the order is by chance; DeepSpeed's own for experts
    of several sizes: tools/deepspeed_faults/experts_in_any_order.py), gradients of other parameters are added.

    Args:
        model: whose parameters they are; one that is no `torch.nn.Module` has none.
        optimizer: of which only the class is told; None where it is still to be made.
        groups: of parameters, or parameters alone. What can be read once only is left out.

    Returns:
        By what the loop would call it. Of experts that are not DeepSpeed's, which may have other names on each rank,
        the groups alone are told.
    """
    named = list(model.named_parameters()) if isinstance(model, torch.nn.Module) else []
    names, parameters = {id(one): name for name, one in named}, [one for _, one in named]
    # DeepSpeed sends the first rank's weights in this order, and steps in it where it is given no other.
    told = {f"the place of {names[id(one)]} in the model": str(at) for at, one in enumerate(_shared(names, parameters))}
    if optimizer is not None:
        told["class of the optimizer"] = type(optimizer).__name__
    experts: dict[str, list[str]] = {}
    for number, group in enumerate([one for one in groups if isinstance(one, Mapping)] or [{"params": groups}]):
        for name, value in numbers_of(group).items():
            told[f"parameter group {number}: {name}"] = value
        inside = list(_parameters([group]))
        for at, one in enumerate(_shared(names, inside)):
            told[f"the place of {names[id(one)]} in the optimizer"] = f"{at} of group {number}"
        for one in filter(is_moe_param, inside):
            # DeepSpeed's have the same names on each rank; others may not.
            name = f", {names.get(id(one), '')}" if hasattr(one, "group_name") else ""
            experts.setdefault(f"experts of {getattr(one, 'group_name', 'a rank')}", []).append(f"group {number}{name}")
    return told | {which: "; ".join(dict.fromkeys(where)) for which, where in experts.items()}


def given_in_words(keywords: Mapping[str, Any]) -> dict[str, str]:
    """Return `groups_in_words` of what `deepspeed.initialize` is given, as far as it says before the engine is built.

    Args:
        keywords: of `deepspeed.initialize`.
    """
    optimizer = keywords.get("optimizer")
    made = optimizer if hasattr(optimizer, "param_groups") else None
    return groups_in_words(keywords.get("model"), made, _given(keywords))


def _shared(names: Container[int], parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (one for one in parameters if id(one) in names and not is_moe_param(one))


def _given(keywords: Mapping[str, Any]) -> Any:
    groups = getattr(keywords.get("optimizer"), "param_groups", None)
    # What is a function makes its optimizer of `model_parameters`.
    return (keywords.get("model_parameters") if groups is None else groups) or ()


def _parameters(groups: Any) -> Iterator[torch.Tensor]:
    if isinstance(groups, Iterator) or not isinstance(groups, Iterable):
        return  # a generator inside a group can be read once only
    for one in groups:
        if isinstance(one, Mapping):
            inside = one.get("params")
            yield from _parameters([inside] if isinstance(inside, torch.Tensor) else inside)
        elif isinstance(one, tuple) and len(one) == 2:  # a parameter with its name
            yield from _parameters(one[1:])
        elif isinstance(one, torch.Tensor):
            yield one
