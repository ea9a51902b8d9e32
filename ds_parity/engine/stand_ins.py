"""What runs in an idle pass: a micro-batch once more, which counts nothing then and says so."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from types import MemberDescriptorType
from typing import Any, Final

import wrapt

_COUNTS: Final = {"rollouts": 0, "prompts": 0, "tokens": 0}
_SILENT: Final = {**_COUNTS, "weight": 0}  # a weight need not be there


def whole(batch: Any) -> Any:
    """Return a copy of a micro-batch with inputs of its own: a loop may take its own apart, an idle pass needs all."""
    inputs = getattr(batch, "inputs", None)
    try:
        again = _with_all_of(copy.copy(batch), batch)
    except Exception:  # what can't be copied is run as it is
        return batch
    if again is batch or not isinstance(inputs, Mapping):
        return again
    return _answering(again, {"inputs": _own(inputs)})


def stand_in(batch: Any) -> Any:
    """Return what an idle pass runs in place of a micro-batch: a copy whose counts are 0 and whose `idle` is True.

    Inputs, and everything else, are those of the micro-batch, whose own counts stay as they are.
    """
    again = _silenced(whole(batch), batch)
    if says_so(again):
        return again
    # One that can't be copied, or that answers by what its constructor was given.
    made = _of_dataclass(batch)
    return made if made is not None and says_so(made) else _StandIn(again)


def _own(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of inputs whose keys can be taken away: of their own class where that can be copied, else a dict.

    A loop may call what its class has, such as `to()` of transformers' BatchEncoding.
    """
    kind = type(inputs)
    if kind is dict:
        return dict(inputs)
    # copy() of a subclass of dict returns a plain one, and copy.copy() of another class may share what holds the keys.
    knows_how = isinstance(inputs, dict) or hasattr(kind, "__copy__")
    copied = copy.copy if knows_how else getattr(kind, "copy", dict)
    try:
        again = copied(inputs)
        has_all = type(again) is kind and again is not inputs and set(again.keys()) == set(inputs.keys())
    except Exception:  # a constructor of its own, say
        has_all = False
    return again if has_all else dict(inputs)


def _silenced(again: Any, batch: Any) -> Any:
    """Return the copy with counts of 0, as far as it can be given them without the micro-batch."""
    if again is batch or _shared(again, batch):
        return again
    if isinstance(again, MutableMapping):  # one whose keys are its attributes
        again.update({name: 0 for name in _SILENT if name in again})
    silent = _COUNTS if _answer(batch, "weight") is None else _SILENT
    return _answering(again, {**silent, "idle": True})


def _with_all_of(again: Any, batch: Any) -> Any:
    """Return the copy with what a class's own way to copy leaves out: it may know what its constructor takes alone."""
    kept = getattr(again, "__dict__", None)
    if again is not batch and type(again) is type(batch) and isinstance(kept, dict):
        kept.update({name: value for name, value in vars(batch).items() if name not in kept})
    return again


def _of_dataclass(batch: Any) -> Any:
    """Return a dataclass made anew with counts of 0, and with what the micro-batch was given behind its constructor."""
    if not is_dataclass(batch) or isinstance(batch, type):
        return None
    names = {field.name for field in fields(batch) if field.init}
    inputs = getattr(batch, "inputs", None)
    own = {"inputs": _own(inputs)} if isinstance(inputs, Mapping) else {}
    answers = {**_SILENT, "idle": True, **own}
    try:
        made = replace(batch, **{name: value for name, value in answers.items() if name in names})
    except Exception:  # a constructor of its own
        return None
    return _with_all_of(made, batch)


def says_so(batch: Any) -> bool:
    """Whether a micro-batch says by itself that it counts nothing and is idle."""
    if _answer(batch, "idle") is not True:
        return False
    return not any(_answer(batch, name) for name in _SILENT)


def _answer(batch: Any, name: str) -> Any:
    try:
        return getattr(batch, name, None)
    except Exception:  # a class may look attributes up as keys
        return None


def _answering(again: Any, answers: dict[str, Any]) -> Any:
    """Return a copy with these attributes, as far as they can be set on it and on nothing that it shares."""
    if isinstance(again, tuple) and hasattr(again, "_replace"):
        known: tuple[str, ...] = getattr(again, "_fields", ())
        return again._replace(**{name: value for name, value in answers.items() if name in known})
    for name, value in answers.items():
        # A property's setter may write to what the copy shares with the micro-batch.
        found = inspect.getattr_static(type(again), name, None)
        if not hasattr(found, "__set__") or isinstance(found, MemberDescriptorType):
            try:
                object.__setattr__(again, name, value)
            except (AttributeError, TypeError):  # it has no place for it
                continue
    return again


def _shared(again: Any, batch: Any) -> bool:
    inputs = getattr(again, "inputs", None)
    return isinstance(inputs, Mapping) and inputs is getattr(batch, "inputs", None)


class _StandIn(wrapt.ObjectProxy[Any]):
    """A micro-batch that takes none of the answers itself: everything else is the micro-batch's."""

    rollouts = prompts = tokens = weight = 0
    idle = True

    def __init__(self, batch: Any) -> None:
        super().__init__(batch)
        inputs = getattr(batch, "inputs", None)
        if isinstance(inputs, Mapping):
            self._self_inputs = _own(inputs)

    @property
    def inputs(self) -> Mapping[str, Any]:
        # Without inputs this raises AttributeError, and the micro-batch is asked, as for every other attribute.
        inputs: Mapping[str, Any] = self._self_inputs
        return inputs

    def __copy__(self) -> _StandIn:
        return _StandIn(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return _StandIn(copy.deepcopy(self.__wrapped__, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _StandIn, (self.__wrapped__,)
