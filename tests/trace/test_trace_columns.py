"""Many lines at once are read as each would be by itself, or left to that way: none is let in that a record refuses."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_parity.errors import TraceError
from ds_parity.trace import Header, StepRecord, TraceWriter, Weights, columns, read_trace
from ds_parity.trace.columns import Columns, TraceFile, columns_of
from ds_parity.trace.quick import FIGURES, NAMES, UnusualError, figures, quick

KNOWN = {"scenario": "s", "seed": 1, "versions": {}, "device": "cpu", "ranks": 1, "config_hash": "ab"}
HEADER = Header(**KNOWN, engine="ds_parity")
LINE = {
    "step": 1, "passes": 2, "idle_passes": 0, "rollouts": 8, "prompts": 2, "tokens": 64, "total": 8.0, "loss": 0.5,
    "lr": [0.1, 0.2], "grad_norm": 1.0, "loss_scale": None, "skipped": False,
    "weights": {"checksum": "a" * 64, "norm": 2.0, "sketch": [1.0, -1.0]}, "metrics": {"reward": 0.25},
}  # fmt: skip


def written(**changes):
    return json.dumps({**LINE, **changes}, separators=(",", ":")).encode() + b"\n"


def same(fields, line):
    """Whether the fields of one line are those of its record, NaN equal to NaN."""
    record = Columns.of([StepRecord.model_validate_json(line)]).fields
    shown = ({name: repr(_floats(values[0])) for name, values in one.items()} for one in (fields, record))
    return next(shown) == next(shown)


def _floats(value):
    if isinstance(value, dict):
        return {name: float(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_floats(it) for it in value]
    return float(value) if type(value) is int else value


ODD = [
    None, True, False, -1, 0, 1, 2**53, 2**53 + 1, 2**63, 10**400, 0.5, -0.0, "NaN", "-Infinity", "nan", "0.5",
    math.nan, math.inf, [], {}, [0.5, True], [0.5, "NaN", 3], [0.5, None], ["x"], [[0.5]], {"a": "NaN"}, {"a": None},
    {"a": True},
    {"a": {}}, {"a": 2}, "a" * 64,
]  # fmt: skip
HELD = [
    {"checksum": check, "norm": norm, "sketch": sketch}
    for check in ("a" * 64, "a" * 63, "A" * 64, "a" * 63 + "\n", "a" * 64 + "\n", 3)
    for norm in (1.0, 2, "NaN", None, True)
    for sketch in ([], [1.0, "Infinity"], [1, 2], [None], None, {})
]
HELD += [
    {"checksum": "a" * 64, "norm": 1.0},
    {**HELD[0], "more": 1},
    {"checksum": "a" * 64, "norm": 1.0, "sketchy": []},
]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_stands_in_a_field_is_read_as_the_record_reads_it_or_left_to_it(name):
    taken = 0
    for value in [*ODD, *(HELD if name == "weights" else [])]:
        line = written(**{name: value})
        try:
            fields = quick([line])
        except UnusualError:
            continue
        taken += 1
        assert same(fields, line), (name, value)
    assert taken


def test_fields_that_are_missing_or_unknown_are_left_to_the_record():
    for lines in (
        [json.dumps({key: value for key, value in LINE.items() if key != "loss_scale"}).encode() + b"\n"],
        [written(more=1)],
        [written().replace(b'"loss"', b'"lost"')],
        [written(), b"[]\n"],
        [written(), b"3\n"],
        [written(), b"\n"],
        [written()[:-1] + b"\r\n"],
        [b" " + written()],
        [written()[:-1]],
        [written()[:-9] + b"\n"],
    ):
        with pytest.raises(UnusualError):
            quick(lines)


TWICE = [
    (b'"loss":0.5', b'"loss":9.0,"loss":0.5', "loss"),
    (b'"loss":0.5', b'"loss":0.5,"\\u006coss":0.5', "loss"),
    (b'"loss":0.5', b'"loss" :9.0, "loss":0.5', "loss"),
    (b'"norm":2.0', b'"norm":3.0,"norm":2.0', "weights.norm"),
    (b'"reward":0.25', b'"reward":9.0,"reward":0.25', "metrics.reward"),
]


@pytest.mark.parametrize(("one", "two", "key"), TWICE)
def test_a_step_with_two_values_of_one_key_is_refused(tmp_path, one, two, key):
    path = tmp_path / "trace.jsonl"
    good, bad = written(), written(step=2).replace(one, two)
    assert bad != written(step=2)
    path.write_bytes(HEADER.model_dump_json().encode() + b"\n" + good + bad)
    with pytest.raises(UnusualError):
        quick([good, bad])
    for read in (lambda: [*TraceFile.open(path).columns()], lambda: read_trace(path)):
        with pytest.raises(TraceError, match=f"line 3: key '{key}' is given more than once"):
            read()


def test_a_header_with_two_values_of_one_key_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER.model_dump_json().encode()[:-1] + b',"seed":2}\n' + written())
    with pytest.raises(TraceError, match="line 1: key 'seed' is given more than once"):
        read_trace(path)


def test_metrics_with_colons_in_their_names_are_read_at_once():
    assert quick([written(metrics={"train:loss": 0.5, "a::b": 1.0}), written(step=2, weights=None, metrics={})])


def test_lines_do_not_make_up_for_each_others_faults():
    two = written()[:-1] + b"," + written(step=2)
    cut = written(step=3).index(b',"rollouts"')  # at a comma, which joining the lines brings back
    halves = [written(step=3)[:cut] + b"\n", written(step=3)[cut + 1 :]]
    for lines in ([two, *halves], [two, written(), b"\n"], [*halves, two]):
        with pytest.raises(UnusualError):
            quick(lines)
        with pytest.raises(UnusualError):
            figures(lines)


VALUES = st.sampled_from([*ODD, *HELD])


@st.composite
def mutated_lines(draw):
    """Some lines as they are written, with fields changed, dropped, added or doubled, and bytes replaced or cut out."""
    lines = []
    for step in range(1, draw(st.integers(1, 4)) + 1):
        line = {**LINE, "step": step, **draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))}
        how = draw(st.sampled_from(["as it is"] * 6 + ["dropped", "added", "doubled", "byte", "cut", "moved"]))
        if how in ("dropped", "moved"):
            value = line.pop(name := draw(st.sampled_from(NAMES)))
            line |= {name: value} if how == "moved" else {}
        text = json.dumps(line | {"more": 1} if how == "added" else line, separators=(",", ":")).encode()
        if how == "doubled":
            text = text[:-1] + b',"loss":0.25}'
        at = draw(st.integers(0, len(text) - 1))
        if how == "byte":
            text = (
                text[:at]
                + draw(st.sampled_from([b"}", b"{", b",", b'"', b"0", b"-", b"e", b"\xff", b" "]))
                + text[at + 1 :]
            )
        lines.append((text[:at] + text[at + draw(st.integers(1, 9)) :] if how == "cut" else text) + b"\n")
    return lines


@settings(max_examples=500, deadline=None)
@given(mutated_lines())
def test_lines_that_are_read_at_once_are_records_and_the_same(lines):
    """Whatever is done to lines: what is taken every record takes, and means the same."""
    for read in (quick, figures):
        try:
            fields = read(lines)
        except UnusualError:
            continue
        for at, line in enumerate(lines):
            one = {name: values[at : at + 1] for name, values in fields.items()}
            try:
                record = Columns.of([StepRecord.model_validate_json(line)]).fields
            except ValidationError:
                assert read is figures  # which leaves the other fields unchecked
                continue
            for name, (value,) in one.items():
                assert repr(_floats(value)) == repr(_floats(record[name][0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.5, 2, None, "NaN", "-Infinity"]), min_size=1, max_size=5))
def test_columns_of_lines_are_those_of_their_records(values):
    lines = [
        written(step=step, loss=value, weights=None if value is None else LINE["weights"])
        for step, value in enumerate(values, 1)
    ]
    records = [StepRecord.model_validate_json(line) for line in lines]
    one, other = Columns(quick(lines), records.__getitem__), Columns.of(records)
    for name in FIGURES:
        assert np.array_equal(one.floats(name).values, other.floats(name).values, equal_nan=True)
        assert np.array_equal(one.floats(name).known, other.floats(name).known)
    a, b = one.rates(3), other.rates(3)
    assert a.values.tolist() == b.values.tolist() == [[0.1, 0.2, 0.0]] * len(values)
    assert one.widths().tolist() == other.widths().tolist() == [2] * len(values)
    one, other = one.weights(), other.weights()
    assert one.known.tolist() == other.known.tolist() == [value is not None for value in values]
    assert [*one.checksums] == [*other.checksums]
    assert one.norms.tolist() == other.norms.tolist()
    assert [*map(tuple, one.sketches)] == [*map(tuple, other.sketches)]


def record(step):
    return StepRecord(**{**LINE, "step": step, "lr": (0.1,), "weights": Weights(checksum="a" * 64, norm=1.0)})


@pytest.mark.parametrize("size", [1, 500, 2000, 1 << 17])
def test_a_file_holds_the_same_steps_however_much_of_it_is_read_at_once(tmp_path, monkeypatch, size):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        for step in range(5, 12):
            writer.write(record(step))
    monkeypatch.setattr(columns, "BYTES", size)
    trace = TraceFile.open(tmp_path / "t")
    assert trace.header == HEADER
    read = [held.record(at) for held in columns_of(trace) for at in range(len(held))]
    assert read == [record(step) for step in range(5, 12)]
    assert trace.excerpt(7, 9).steps == tuple(record(step) for step in (7, 8, 9))
    assert next(trace.columns()).steps[0] == 5
    assert sum(len(fields["loss"]) for fields in trace.figures()) == 7


def test_a_cut_keeps_its_own_records():
    held = Columns.of([record(step) for step in (1, 2, 3, 4)]).cut(1, 4).cut(1, 2)
    assert held.steps == [3]
    assert held.record(0) == record(3)


def test_records_that_leave_optional_fields_out_are_read_the_slow_way(tmp_path):
    path = tmp_path / "t"
    TraceWriter(path, HEADER).close()
    kept = {key: value for key, value in LINE.items() if key not in ("loss_scale", "skipped", "weights", "metrics")}
    with path.open("a") as file:
        file.writelines(json.dumps({**kept, "step": step}) + "\n" for step in (1, 2))
    (held,) = TraceFile.open(path).columns()
    assert held.fields["weights"] == [None, None]
    with path.open("a") as file:
        file.write(json.dumps({**kept, "step": 3, "tokens": -1}) + "\n")
    with pytest.raises(TraceError, match=r"line 4: tokens: .*got -1"):
        list(TraceFile.open(path).columns())
