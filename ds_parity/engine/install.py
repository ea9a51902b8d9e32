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

_LOCK = RLock()
_OPEN: list[Installation] = []


def install() -> Installation:
    """Make `deepspeed.initialize` honour the extra keys, for accelerate, transformers' Trainer, TRL and their like.

    Takes effect at once, before or after those are imported, also under names that modules hold
    (`from deepspeed import initialize`), until `uninstall()` or the end of a `with` block. May be nested: DeepSpeed's
    own comes back with the last one. Engines that were made meanwhile stay as they are. A configuration without the
    extra keys, and an engine without an optimizer (a reference model), are DeepSpeed's own.

    An engine that is made so takes what `ParityEngine` refuses: `set_gradient_accumulation_boundary`, by which such a
    framework says where its windows end, and `scale_wrt_gas=False`. What it says is checked against the counts in every
    pass.

    Returns:
        what undoes it; a context manager, too.
    """
    return Installation()


class Installation(AbstractContextManager["Installation"]):
    """One `install()`, undone by `uninstall()`."""

    def __init__(self) -> None:
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
                _Replacement.put_in()
            _OPEN.append(self)


class _Replacement:
    """The pair of functions that stand for each other; None while DeepSpeed's own is in its place."""

    bare: Initialize | None = None
    honouring: Initialize | None = None

    @classmethod
    def put_in(cls) -> None:
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
