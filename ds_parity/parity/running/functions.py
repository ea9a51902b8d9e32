"""A user's functions by their names: models, loops and setups, as ranks import them."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import redirect_stdout
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_parity.errors import ConfigError


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function`, or `package.module:Class.function`, names.

    Raises:
        ConfigError: there is no such module or function.
    """
    module, _, path = name.partition(":")
    try:
        # What is printed as a module is imported (DeepSpeed logs to standard output) is no result.
        with redirect_stdout(sys.stderr):
            found = importlib.import_module(module)
        function = operator.attrgetter(path)(found)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise _unknown(name, error) from error
    if not callable(function):
        raise ConfigError(f"{name!r} is a {type(function).__name__}: it must be a function")
    return function  # type: ignore[no-any-return]


def run_loop(name: str, engine: Any, micro_batches: Any) -> None:
    """Call a training function with an engine and its micro-batches.

    Raises:
        ConfigError: as `resolve`; or it takes other arguments; or what it returned is a generator or a coroutine, of
            which nothing has run.
    """
    function = resolve(name)
    _refuse_other_arguments(name, function, (engine, micro_batches))
    returned = function(engine, micro_batches)
    if isinstance(returned, Generator | AsyncGenerator | Coroutine):
        raise ConfigError(
            f"train {name!r} returned a {type(returned).__name__}, of which nothing has run: it must train when it is "
            "called; leave out its yield or async, or name a function that runs it to its end"
        )


def _refuse_other_arguments(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        # A decorator may take other arguments than what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions that are built in have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"train {name!r} takes {signature}, and is called with an engine and micro_batches ({error}): "
            "write def train(engine, micro_batches), or name another function"
        ) from error


def refuse_unknown(name: str, folders: Sequence[str] = ()) -> None:
    """Refuse a function whose package no rank would find, before any rank is started.

    Nothing is imported: what a user's module does when it is, such as asking for the accelerator, belongs to the ranks.

    Args:
        name: as `resolve` takes it.
        folders: where ranks look beside the working directory, PYTHONPATH as it stands now, and the installed packages.

    Raises:
        ConfigError: there is no such package, or the name is not of that form.
    """
    module, _, function = name.partition(":")
    if not function:
        raise _unknown(name, "no function behind a ':'")
    package = module.partition(".")[0]
    if package == "__main__":
        raise _unknown(name, "the main module of ranks is another one: put the function into a module of its own")
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if not package or not _can_be_found(package, [*folders, *inherited, working_folder()]):
        raise _unknown(name, f"no module named {module!r}")


def working_folder() -> str:
    """Return the current folder, in which ranks are started.

    Raises:
        ConfigError: it was removed.
    """
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise ConfigError(
            "the current folder was removed: ranks are started in it; change into one that exists"
        ) from None


def _can_be_found(package: str, folders: list[str]) -> bool:
    before = sys.path[:]
    sys.path[:0] = folders
    importlib.invalidate_caches()  # it may have been written since somebody looked
    try:
        return find_spec(package) is not None
    except ValueError:  # a module of this process that was made by hand; ranks look for a file
        return PathFinder.find_spec(package) is not None
    finally:
        sys.path[:] = before


def _unknown(name: str, why: object) -> ConfigError:
    return ConfigError(
        f"{name!r} does not name a function that can be imported ({why}): write package.module:function, and start "
        "where Python can import the package"
    )
