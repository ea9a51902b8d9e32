"""Many lines of a trace at once. What `TraceWriter` would write otherwise is left to the slow way."""

import re
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json
from typing_extensions import TypedDict

from ds_parity.trace.records import HYPOTHESES, NOT_FINITE, StepRecord, Weights

COUNTS = ("passes", "idle_passes", "rollouts", "prompts", "tokens")
FIGURES = ("total", "loss", "grad_norm", "loss_scale")
# Lines with hypotheses are few and long, and read the slow way.
NAMES = tuple(name for name in StepRecord.model_fields if name != HYPOTHESES)

Fields = dict[str, Sequence[Any]]
_NAMES = set(NAMES)
_FIELDS = itemgetter(*NAMES)
_WEIGHTS = itemgetter(*Weights.model_fields)
_CHECKSUMS = re.compile(r"(?:[0-9a-f]{64}\n)*")
_LIMIT = 2**63
_EXACT = 2**53  # up to here an integer is the float of the same value
_NONE = type(None)


class _Figures(TypedDict):
    rollouts: Any
    loss: Any
    grad_norm: Any
    metrics: Any


_FIGURES = TypeAdapter(list[_Figures])  # the rest of a line never becomes objects of Python


class UnusualError(Exception):
    """Lines that are not as `TraceWriter` writes them; they may be valid all the same."""


def quick(lines: Sequence[bytes]) -> Fields:
    """Read lines at once, each a step: the values of every field, as `StepRecord` would hold them but for two.

    Weights are tuples of checksum, norm and sketch. What must be a float may be an integer of the same value.

    Raises:
        UnusualError: the lines are not valid, or valid in another way than `TraceWriter`'s.
    """
    fields: Fields = dict(zip(NAMES, zip(*map(_FIELDS, _rows(lines)), strict=True), strict=True))
    _whole(fields["step"], 1, {int})
    for name in COUNTS:
        _whole(fields[name], 0, {int, _NONE})
    for name in FIGURES:
        fields[name] = _floats(fields[name], {float, _NONE})
    _require({*map(type, fields["skipped"])} <= {bool, _NONE})
    fields["lr"] = _lists(fields["lr"], {list, _NONE})
    fields["weights"] = _weights(fields["weights"])
    fields["metrics"] = _metrics(fields["metrics"])
    _require(sum(line.count(b":") for line in lines) == _colons(fields))
    return fields


def _colons(fields: Fields) -> int:
    """How many colons lines have in which no key is given twice: one behind each key, and those in names of metrics."""
    nested: list[dict[str, float]] = [*filter(None, fields["metrics"])]
    keys = len(fields["step"]) * len(NAMES) + sum(map(len, nested))
    weights = len(fields["weights"]) - list(fields["weights"]).count(None)
    return keys + weights * len(Weights.model_fields) + sum(name.count(":") for it in nested for name in it)


def figures(lines: Sequence[bytes]) -> Fields:
    """Read `rollouts`, `loss`, `grad_norm` and `metrics` of lines at once, as `quick` does. Nothing else is checked.

    Raises:
        UnusualError: as `quick`.
    """
    rows = _parsed(lines, _FIGURES.validate_json)
    fields: Fields = {name: [row[name] for row in rows] for name in ("rollouts", "loss", "grad_norm", "metrics")}
    _whole(fields["rollouts"], 0, {int, _NONE})
    for name in ("loss", "grad_norm"):
        fields[name] = _floats(fields[name], {float, _NONE})
    return {**fields, "metrics": _metrics(fields["metrics"])}


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    rows = _parsed(lines, from_json)
    _require({*map(type, rows)} == {dict} and set().union(*rows) == _NAMES and {*map(len, rows)} == {len(NAMES)})
    return rows


def _parsed(lines: Sequence[bytes], parse: Callable[[bytes], list[Any]]) -> list[Any]:
    # No valid step holds `}` and `{` with nothing but a comma between them, so lines can't make up for the faults of
    # others.
    joined = b",".join(lines)
    alone = joined.count(b"}\n,{") == len(lines) - 1
    _require(alone and joined.startswith(b"{") and joined.endswith(b"}\n"))
    try:
        rows = parse(b"[" + joined + b"]")
    except ValueError as error:
        raise UnusualError from error
    _require(len(rows) == len(lines))
    return rows


def _require(condition: bool) -> None:
    if not condition:
        raise UnusualError


def _whole(values: Sequence[Any], least: int, types: set[type]) -> None:
    kinds = {*map(type, values)}
    _require(kinds <= types)
    known = [value for value in values if value is not None] if _NONE in kinds else values
    _require(not known or (min(known) >= least and max(known) < _LIMIT))


def _floats(values: Sequence[Any], types: set[type]) -> Sequence[Any]:
    """Values with the words for NaN and the infinities replaced."""
    kinds = {*map(type, values)}
    if kinds <= types:
        return values
    if str in kinds:
        values = [NOT_FINITE.get(value, value) if type(value) is str else value for value in values]
        kinds = {*map(type, values)}
    _require(kinds <= {*types, int})
    _require(all(abs(value) <= _EXACT for value in values if type(value) is int))
    return values


def _lists(values: Sequence[Any], types: set[type]) -> Sequence[Any]:
    """Lists of floats; None where `types` has it."""
    _require({*map(type, values)} <= types)
    known = [value for value in values if value is not None]
    flat = list(chain.from_iterable(known))
    floats = _floats(flat, {float})
    if floats is flat:
        return values
    taken = iter(floats)
    return [value if value is None else [next(taken) for _ in value] for value in values]


def _weights(values: Sequence[Any]) -> Sequence[Any]:
    _require({*map(type, values)} <= {dict, _NONE})
    known = [value for value in values if value is not None]
    if not known:
        return values
    _require({*map(len, known)} == {len(Weights.model_fields)})
    try:
        checksums, norms, sketches = zip(*map(_WEIGHTS, known), strict=True)
    except KeyError as error:
        raise UnusualError from error
    _require({*map(type, checksums)} == {str} and bool(_CHECKSUMS.fullmatch("\n".join((*checksums, "")))))
    taken = iter(zip(checksums, _floats(norms, {float}), _lists(sketches, {list}), strict=True))
    return [None if value is None else next(taken) for value in values]


def _metrics(values: Sequence[Any]) -> Sequence[Any]:
    _require({*map(type, values)} == {dict})
    if not any(values):
        return values
    flat = [*chain.from_iterable(value.values() for value in values)]
    floats = _floats(flat, {float})
    if floats is flat:
        return values
    taken = iter(floats)
    return [{name: next(taken) for name in value} for value in values]
