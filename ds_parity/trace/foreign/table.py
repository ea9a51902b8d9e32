"""CSV: a header, then a row a line; also what the charts of Weights & Biases and TensorBoard export."""

import csv
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ds_parity.errors import TraceError
from ds_parity.trace.foreign.source import Source, SourceRow
from ds_parity.trace.opening import opened, opened_text

_DELIMITERS = ",\t;"


def table(path: Path) -> Source:
    """A CSV file, separated by commas, tabs or semicolons, whichever its header holds most of. Read a row at a time.

    Raises:
        TraceError: the header has one column, or names one twice.
    """
    delimiter, header = _header(path)
    wandb = header[0] == "Step" and any(" - " in column for column in header)
    notes = () if _ends_whole(path) else ("its last line has no newline: it may have been cut short there",)
    return Source(path, "wandb" if wandb else "csv", partial(_rows, path, delimiter, header), notes=notes)


def _header(path: Path) -> tuple[str, list[str]]:
    with opened_text(path) as file:
        line = file.readline()
    delimiter = max(_DELIMITERS, key=line.count)
    header = next(_lines(path, delimiter), (1, [], True))[1]
    if len(header) < 2:
        raise TraceError(
            f"{path}, line 1: {line.strip()!r:.60} is neither the header of a CSV file (two columns or more) nor of "
            "a trace"
        )
    doubled = [column for column, times in Counter(header).items() if column and times > 1]
    if doubled:
        raise TraceError(
            f"{path}, line 1: {doubled[0]!r} names {header.count(doubled[0])} columns: name each differently"
        )
    return delimiter, header


def _rows(path: Path, delimiter: str, header: list[str]) -> Iterator[SourceRow]:
    whole = _ends_whole(path)
    lines = _lines(path, delimiter)
    next(lines)
    for number, values, last in lines:
        if not values:
            continue
        if len(values) != len(header):
            cut = last and not whole and len(values) < len(header)
            why = "cut short: its writer was stopped in mid-line" if cut else "a row has a cell for each column"
            raise TraceError(f"{path}, line {number}: {len(values)} cells where the header has {len(header)}: {why}")
        cells = zip(header, map(str.strip, values), strict=True)
        yield SourceRow(f"line {number}", {column: cell for column, cell in cells if column and cell})


def _lines(path: Path, delimiter: str) -> Iterator[tuple[int, list[str], bool]]:
    """Line number, cells, and whether it is the last line."""
    with opened_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        before: tuple[int, list[str]] | None = None
        try:
            for values in reader:
                if before is not None:
                    yield (*before, False)
                before = reader.line_num, values
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: no CSV: {error}") from error
        if before is not None:
            yield (*before, True)


def _ends_whole(path: Path) -> bool:
    with opened(path) as file:
        file.seek(0, 2)
        file.seek(max(file.tell() - 1, 0))
        return file.read() in (b"\n", b"\r")
