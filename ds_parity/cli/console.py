"""What is said: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import wrapt
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from ds_parity.parity.comparison.compare import Comparison
    from ds_parity.parity.diagnosis import Diagnosis
    from ds_parity.parity.report import Contents


# A pipe has no width of its own, and 80 columns would cut numbers short.
_WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else 120
out, err = Console(width=_WIDTH), Console(stderr=True)


class _Dispensable(wrapt.ObjectProxy[TextIO]):
    """A stream whose text is dropped, from then on, where it can't be written (a full disk, nobody reads).

    Messages and progress have no part in the verdict, and a run of an hour does not end because of them.
    """

    def write(self, text: str) -> int:
        try:
            self.__wrapped__.write(text)
        except OSError:
            _forget(self.__wrapped__)
        return len(text)

    def flush(self) -> None:
        try:
            self.__wrapped__.flush()
        except OSError:
            _forget(self.__wrapped__)


def open_streams() -> None:
    """Let everything be printed: a stream that is closed (`>&-`) takes all, and one of another encoding writes `?`.

    Only where standard output can't be written, printing raises an OSError.
    """
    # rich would leave with 1 where nobody reads any more, and typer prints its help with consoles of its own.
    Console.on_broken_pipe = _raise_broken_pipe  # type: ignore[method-assign, assignment]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The process's own for as long as it lives: the lowest free number is that of the closed one.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    sys.stderr = _Dispensable(sys.stderr)


def forget_output() -> None:
    """Leave what can't be written: Python would try it once more while it ends, and say so in a traceback."""
    _forget(sys.stdout)


def _forget(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _raise_broken_pipe(_: Console) -> NoReturn:
    raise BrokenPipeError


def printed(sign: str, plain: str) -> str:
    """Return a sign where standard output can write it, and what stands for it otherwise."""
    try:
        sign.encode(out.encoding)
    except (UnicodeEncodeError, LookupError):
        return plain
    return sign


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error; yields what tells it (ranks' calls done, what runs).

    What stands behind a semicolon in what runs (a compile, a lock that is waited for) is printed once in full above the
    bar, whose line ends at the terminal's edge.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    said: set[str] = set()
    # A call takes seconds to minutes, so that the speed of the last 30 seconds says nothing of the next.
    with Progress(*columns, console=err, transient=True, speed_estimate_period=3600) as bar, _quiet():
        task = bar.add_task("starting ranks", total=total)

        def tell(done: int, title: str) -> None:
            doing, _, aside = title.partition("; ")
            if aside and aside not in said:
                said.add(aside)
                err.print(f"{doing}: {aside}", markup=False, highlight=False, soft_wrap=True)
            bar.update(task, completed=done, description=doing)

        yield tell


@contextmanager
def _quiet() -> Iterator[None]:
    # torch and what it imports tell their own users of changes to come, in the middle of the bar.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def show(comparison: Comparison, title: str, diagnosis: Diagnosis | None = None) -> None:
    """Print a comparison's table, its verdict and what explains it."""
    from ds_parity.parity.report import terminal

    out.print(f"\n{title}", style="bold", markup=False, highlight=False, soft_wrap=True)
    out.print(terminal.render(comparison))
    out.print(terminal.verdict(comparison), markup=False, highlight=False, soft_wrap=True)
    for line in terminal.explained(diagnosis) if diagnosis else ():
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def verdict(good: bool, sentence: str) -> None:
    """Print the last line: PASS or FAIL."""
    out.print(("PASS: " if good else "FAIL: ") + sentence, style="bold green" if good else "bold red", highlight=False)


def plain(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values."""
    rows = [{**asdict(row), "candidate": row.candidate and row.candidate.model_dump()} for row in comparison.rows]
    return {**asdict(comparison), "rows": rows, "equal": comparison.equal}


def print_json(value: Any) -> None:
    """Print JSON for machines; it has no NaN and no infinity, which are strings here as they are in a trace."""
    sys.stdout.write(json.dumps(_spelt(value), indent=2, default=str, allow_nan=False) + "\n")


def _spelt(value: Any) -> Any:
    """Return a value whose numbers JSON can write."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _spelt(one) for name, one in value.items()}
    return [_spelt(one) for one in value] if isinstance(value, list | tuple) else value


def leave(contents: Contents, report: Path | None, junit: Path | None) -> None:
    """Write the report and the JUnit file that were asked for, and say where."""
    from ds_parity.parity import report as reports

    for path in reports.write(contents, report, junit):
        err.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
