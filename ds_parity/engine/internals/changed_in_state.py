"""Parameters that a model's state has in another way than the model, and that ZeRO 3 saves as they are in the model.

A hook of the state, or a module's own `_save_to_state_dict`, gives a parameter another name or value, or packs several.
On ZeRO 3 those of a state are empty, and DeepSpeed saves a rank's part of each beside it. Where these are put together
and given to `load_state_dict()` (weights alone: runtime/engine.py, _load_checkpoint, 0.19.8), hooks of the load convert
what no hook has converted: without an error a weight is half of what was saved, or stays the new engine's
(tools/deepspeed_faults/converted_twice.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.engine.internals.model_names import name_of_state
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine, Parameter
from ds_parity.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ChangedInState:
    """What the state of a model does not have as it is.

    Attributes:
        parameters: by the names that they would have there.
        made: names in the state of what is made of them.
        mixed: those of `made` that are made of buffers, too, which a checkpoint has nowhere else.
        lost: a rank has such.
    """

    parameters: Mapping[str, Parameter]
    made: frozenset[str] = frozenset()
    mixed: frozenset[str] = frozenset()
    lost: bool = False

    def put_into(self, module: torch.nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state that was saved, with what hooks make of these parameters, as they are now, in their place.

        All ranks call it, and they are gathered for a while.

        Args:
            module: the model.
            saved: what ZeRO 3 has saved, by names of the state, in which no hook has converted them.

        Raises:
            CheckpointError: a buffer is nowhere but in one tensor with them.
        """
        if self.lost:  # on every rank, where one alone has a state
            lost = next((name for name, _ in _persistent(module) if name not in saved), "a buffer")
            where = f" ({min(self.mixed)})" if self.mixed else ""
            raise CheckpointError(
                f"the model's state has weights and buffers in one tensor{where}, and ZeRO stage 3 has no "
                f"whole weights where it saves a state, so that {lost} is lost: have the state keep buffers by their "
                "own names where it is saved. Loading ends half way, so start a new engine"
            )
        state = copy(saved)  # with torch's attribute of a state (`_metadata`)
        for name in self.parameters.keys() | self.made:
            state.pop(name, None)
        with GatheredParameters([*self.parameters.values()]), torch.no_grad():
            state.update(_copied(_state(module), self.made))
        return state


def changed_in_state(
    module: torch.nn.Module, looked_at: Mapping[str, Parameter], saved: Container[str] = ()
) -> ChangedInState:
    """Return those parameters that the state of a model does not have as they are, on any rank.

    What is only copied there, or moved, is as it is. All ranks call it, and all of these are gathered for a while.

    Args:
        module: the model.
        looked_at: parameters of it by their names in its state, alike on all ranks.
        saved: names of what a checkpoint has; buffers that are not there may be lost.
    """
    if not looked_at:
        return ChangedInState({})
    with GatheredParameters([*looked_at.values()]), torch.no_grad():
        own = _state(module, as_parameters=True)  # nothing where hooks need tensors without a gradient
        other = {name: one for name, one in looked_at.items() if own.get(name) is not one}
        weights = [*dict.fromkeys(other.values())]
        with _drawn(weights, 0):
            state = _state(module) if other else {}
            # Hooks may refuse such values; then all that is not known to be as it is counts as changed.
            apart = {name for name, one in other.items() if not _is_as_it_is(state.get(name), one)}
            anywhere = on_any_rank([name in apart for name in looked_at])
            changed = {name: one for (name, one), found in zip(looked_at.items(), anywhere, strict=True) if found}
            if not changed:
                return ChangedInState({})
            beside = state.keys() - (looked_at.keys() - changed.keys())
            first = _copied(state, beside)
            again = _copied(_state(module), beside)
        with _drawn(weights, 1):
            second = _copied(_state(module), beside)
            with _drawn([one for name, one in _persistent(module) if name not in saved and _can_be_drawn(one)], 2):
                third = _copied(_state(module), beside)
    # What is another one each time, as a module's own state without an equality is, tells nothing.
    made = {name for name in _unlike(first, second) if _alike(first[name], again.get(name))}
    mixed = made & _unlike(second, third)
    (lost,) = on_any_rank([bool(mixed)])
    return ChangedInState(changed, frozenset(made | changed.keys()), frozenset(mixed), lost)


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """The names of what is another one in one of two states; none where hooks have refused the second."""
    return {name for name in one if not _alike(one[name], other.get(name))} if other else set()


def _can_be_drawn(buffer: torch.Tensor) -> bool:
    return 0 not in buffer.stride()  # of an expanded one an element has several places


@contextmanager
def _drawn(tensors: Sequence[torch.Tensor], seed: int) -> Iterator[None]:
    """Return a context in which tensors have values that are drawn: a zero stays one when it is doubled."""
    kept = [(one.data, one.data.clone()) for one in tensors]
    try:
        for number, (one, _) in enumerate(kept):  # two may be alike
            generator = torch.Generator().manual_seed(1000 * seed + number)
            drawn = torch.rand(one.shape, generator=generator, device="cpu")
            signed = one.is_floating_point() or one.is_complex()
            one.copy_(drawn > 0.5 if one.dtype == torch.bool else 2 * drawn - 1 if signed else 25 + 100 * drawn)
        yield
    finally:
        for one, data in kept:
            one.copy_(data)


def on_any_rank(found: Sequence[bool]) -> list[bool]:
    """Return what is true on one rank at least, where a state may be another one on each. All ranks call it."""
    flags = torch.tensor(found, dtype=torch.int32, device=get_accelerator().current_device_name())
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def _copied(state: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    found = {key: value for name, value in state.items() if (key := name_of_state(name)) in names}
    return {name: _copy(one) for name, one in found.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    try:
        return deepcopy(value)
    except Exception:  # of whatever type it is
        return value


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and alike_tensors(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
    except Exception:  # of whatever type it is
        return False


def alike_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one shape and one number in each place, of which NaN is one, too."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers by the names that the state would have for them."""
    for prefix, one in module.named_modules():
        for name, buffer in one.named_buffers(recurse=False):
            if name not in one._non_persistent_buffers_set:
                yield name_of_state(f"{prefix}.{name}" if prefix else name), buffer


def _state(module: torch.nn.Module, *, as_parameters: bool = False) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = module.state_dict(keep_vars=True) if as_parameters else module.state_dict()
    except Exception:
        return {}
    return state


def _is_as_it_is(value: Any, parameter: Parameter) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dtype != parameter.dtype:
        return False
    return torch.equal(value.to(parameter.device), parameter.data)


def write(parameters: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """Write whole values into parameters of ZeRO 3. All ranks call it.

    Args:
        parameters: by name.
        values: by name, alike on every rank; those of other names have no part in it.

    Raises:
        CheckpointError: a value has another shape.
    """
    for name, one in parameters.items():
        refuse_another_shape(name, values[name].shape, one)
    with GatheredParameters([*parameters.values()], modifier_rank=0), torch.no_grad():
        for name, one in parameters.items():
            one.copy_(values[name])


def refuse_another_shape(name: str, saved: Iterable[int], parameter: Parameter) -> None:
    """Raise CheckpointError where a checkpoint has a parameter in a shape that is not the model's."""
    there, own = tuple(saved), tuple(getattr(parameter, "ds_shape", parameter.shape))
    if there != own:
        raise CheckpointError(
            f"the checkpoint's {name} has the shape {there}, and this model's has {own}: load it into the model that "
            "was saved. Loading ends half way, so start a new engine"
        )


def has_own_load(module: torch.nn.Module) -> bool:
    """Return whether a model loads a state in a way of its own, which may be less strict, or say nothing of names."""
    name = torch.nn.Module.load_state_dict.__name__
    return name in vars(module) or getattr(type(module), name) is not getattr(torch.nn.Module, name)


@contextmanager
def written_as_they_are(engine: Engine, made: Callable[[], set[str] | None]) -> Iterator[None]:
    """Return a context in which whole weights that are loaded into a model end as they were given, whatever hooks do.

    What a function of the caller's loads is its own.

    Args:
        engine: a bare DeepSpeed engine on ZeRO 3.
        made: names of what hooks have made of a state, which those of the load need not know without the weights of
            which they have made it; None where what is loaded has no whole weights, but what ZeRO 3 saves of them.
    """

    def behind(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(checkpoint: Mapping[str, Any], *args: Any, custom_load_fn: Any = None, **kwargs: Any) -> Any:
            loading, names = partial(load, *args, custom_load_fn=custom_load_fn, **kwargs), made()
            if custom_load_fn is not None or names is None:
                return loading(checkpoint)
            whole, named = checkpoint["module"], engine.module.named_parameters(remove_duplicate=False)
            there = {key: one for name, one in named if (key := name_of_state(name)) in whole}
            changed = changed_in_state(engine.module, there, whole)
            if not changed.parameters:
                return loading(checkpoint)
            given = {name: whole[name].clone() for name in changed.parameters}  # hooks may write into what they get
            write(changed.parameters, given)
            state = {**checkpoint, "module": changed.put_into(engine.module, whole)}
            if has_own_load(engine.module):  # which is as strict as it is
                result = loading(state)
            else:
                with _strict_but_for(engine.module, set(changed.parameters), names):
                    result = loading(state)
            write(changed.parameters, given)  # hooks may have rounded them
            return result

        return loaded

    with wrapped(engine, "load_module_state_dict", behind):
        yield


@contextmanager
def _strict_but_for(module: torch.nn.Module, changed: set[str], made: set[str]) -> Iterator[None]:
    """Return a context in which a strict load minds neither these names of parameters, nor what hooks have made."""

    def minding(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(state: Mapping[str, Any], strict: bool = True, **options: Any) -> Any:
            found = load(state, strict=False, **options)
            missing = [name for name in found.missing_keys if name_of_state(name) not in changed]
            unexpected = [name for name in found.unexpected_keys if name_of_state(name) not in changed | made]
            said = [
                f"{which} key(s) in state_dict: {', '.join(f'{name!r}' for name in names)}."
                for which, names in (("Missing", missing), ("Unexpected", unexpected))
                if names
            ]
            if strict and said:  # as torch says it
                raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: {' '.join(said)}")
            return found

        return loaded

    with wrapped(module, "load_state_dict", minding):
        yield
