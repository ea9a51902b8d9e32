"""`deepspeed.initialize` that honours the extra keys, for frameworks that call it themselves."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from threading import RLock
from types import ModuleType
from typing import Any

import deepspeed

from ds_parity.engine.framework import FrameworkEngine
from ds_parity.engine.initialize import Initialize, extended_config, honoured
from ds_parity.engine.trainers import Normalising
from ds_parity.errors import ConfigError

_LOCK = RLock()
_OPEN: list[Installation] = []


def install(*, normalise: str | None = None) -> Installation:
    """Make `deepspeed.initialize` honour the extra keys, for accelerate, transformers' Trainer, TRL and their like.

    Takes effect at once, before or after those are imported, also under names that modules hold
    (`from deepspeed import initialize`), until `uninstall()` or the end of a `with` block. May be nested: DeepSpeed's
    own comes back with the last one. Engines that were made meanwhile stay as they are. A configuration without the
    extra keys, and an engine without an optimizer (a reference model), are DeepSpeed's own.

    An engine that is made so takes what `ParityEngine` refuses: `set_gradient_accumulation_boundary`, by which such a
    framework says where its windows end, and `scale_wrt_gas=False`. What it says is checked against the counts in every
    pass.

    Args:
        normalise: `token` or `rollout`: have transformers' Trainer, TRL's SFTTrainer, GRPOTrainer and AsyncGRPOTrainer
            divide each loss by the number of these that its step contains on all ranks, whatever they divide it by
            themselves. It must be what their loss is a mean over: tokens for labels and for TRL's `bnpo`, `dapo`,
            `cispo` and `vespo`, rollouts for the others. What they log stays theirs; `engine.last_step.loss` is right.
            None: their own division stands.

    Returns:
        what undoes it; a context manager, too.

    Raises:
        ConfigError: `normalise` is none of these, transformers is not installed, or another installation that is not
            undone yet says otherwise. Where a loss is no mean over this unit, its first step raises it.
    """
    return Installation(normalise)


class Installation(AbstractContextManager["Installation"]):
    """One `install()`, undone by `uninstall()`."""

    def __init__(self, normalise: str | None = None) -> None:
        self._normalise = normalise
        self._enter()

    def __enter__(self) -> Installation:
        self._enter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Undo this `install()`; a second time it does nothing."""
        with _LOCK:
            if self in _OPEN:
                _OPEN.remove(self)
                if not _OPEN:
                    _Replacement.take_back()

    def _enter(self) -> None:
        with _LOCK:
            if self in _OPEN:
                return
            if not _OPEN:
                _Replacement.put_in(self._normalise)
            elif self._normalise != _Replacement.normalise:
                raise ConfigError(
                    f"install(normalise={self._normalise!r}) inside install(normalise={_Replacement.normalise!r}): one "
                    "division holds for all trainers; undo the outer one first, or give both the same"
                )
            _OPEN.append(self)


class _Replacement:
    """The pair of functions that stand for each other; None while DeepSpeed's own is in its place."""

    bare: Initialize | None = None
    honouring: Initialize | None = None
    normalise: str | None = None
    normalising: Normalising | None = None

    @classmethod
    def put_in(cls, normalise: str | None) -> None:
        # What may be refused comes before anything is replaced.
        cls.normalising = None if normalise is None else Normalising(normalise)
        cls.normalise = normalise
        if cls.normalising is not None:
            cls.normalising.put_in()
        cls.bare = deepspeed.initialize
        cls.honouring = _honouring(cls.bare)
        _rename(cls.bare, cls.honouring)

    @classmethod
    def take_back(cls) -> None:
        # Names that modules took meanwhile go back, too. Where somebody has wrapped it meanwhile, their function stays,
        # and this one passes on.
        if cls.bare is not None and cls.honouring is not None:
            _rename(cls.honouring, cls.bare)
        cls.bare = cls.honouring = None
        if cls.normalising is not None:
            cls.normalising.take_back()
        cls.normalising = cls.normalise = None


def _rename(old: Initialize, new: Initialize) -> None:
    for module, name in _names_of(old):
        setattr(module, name, new)


def _names_of(function: Initialize) -> Iterator[tuple[ModuleType, str]]:
    # Through __dict__, so that no lazy module imports what it only offers.
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if value is function:
                yield module, name


def _honouring(bare: Initialize) -> Initialize:
    signature = inspect.signature(bare)

    @functools.wraps(bare)
    def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        if not _OPEN:
            return bare(*args, **kwargs)
        keywords = signature.bind(*args, **kwargs).arguments
        extended = extended_config(keywords)
        if extended is None:
            return bare(*args, **kwargs)
        return honoured(keywords, extended, bare, FrameworkEngine)

    return initialize
