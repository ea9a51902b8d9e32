"""Foreign files: what they hold comes back as it was written, and every fault is a TraceError with its place."""

import csv
import io
import json
import math
import re
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_parity.errors import ConfigError, TraceError
from ds_parity.trace import Header, Precision, StepRecord, TraceWriter, read_trace
from ds_parity.trace.foreign import parse_maps, read_any, read_pair

OWN = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="ds_parity")
NOT_A_NUMBER = pytest.mark.parametrize("text", ["high", "1,5", "1_000", "0x1", "True", "-"])


def put(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path, *maps, **options):
    return read_any(path, parse_maps(maps), **options)


def refused(path, *maps):
    with pytest.raises(TraceError, match=re.escape(str(path))) as error:
        read(path, *maps)
    return str(error.value).removeprefix(str(path))


def read_or_named(path):
    """Whether a file has steps, or is refused with its name; any other exception is let through."""
    try:
        return bool(read(path).steps)
    except TraceError as error:
        return str(path) in str(error)


def losses(trace):
    return {record.step: record.loss for record in trace.steps}


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


class TestTheRecord:
    def test_what_the_trainer_does_not_know_is_none(self, tmp_path):
        trace = read(put(tmp_path / "a.csv", "step,loss\n1,0.5\n"))
        assert trace.steps[0].model_dump(exclude_none=True) == {"step": 1, "loss": 0.5, "metrics": {}}
        assert trace.header.model_dump(exclude_none=True) == {
            "schema_version": 1,
            "engine": "csv",
            "records": ("loss",),
        }
        assert trace.header.foreign
        assert not OWN.foreign

    def test_counts_are_whole_and_a_learning_rate_is_one_per_group(self, tmp_path):
        path = put(tmp_path / "a.csv", "step,a,b,n\n1,0.1,0.2,6.4e1\n")
        (record,) = read(path, "lr=a", "lr=b", "rollouts=n").steps
        assert (record.lr, record.rollouts) == ((0.1, 0.2), 64)
        assert isinstance(record.rollouts, int)

    def test_a_step_that_lacks_the_lr_of_one_group_has_an_unknown_lr(self, tmp_path):
        path = put(tmp_path / "a.csv", "step,a,b\n1,0.1,0.2\n2,0.1,\n")
        assert [record.lr for record in read(path, "lr=a", "lr=b").steps] == [(0.1, 0.2), None]

    @pytest.mark.parametrize("text", ["-1", "1.5", "nan", "1e30"])
    def test_a_count_that_is_none_is_refused(self, tmp_path, text):
        path = put(tmp_path / "a.csv", f"step,n\n1,{text}\n")
        assert f", line 2: rollouts ('n') is {text}" in refused(path, "rollouts=n")

    def test_a_foreign_trace_that_is_written_as_ours_stays_foreign(self, tmp_path):
        trace = read(put(tmp_path / "a.csv", "step,loss\n1,nan\n"))
        with TraceWriter(tmp_path / "t.jsonl", trace.header) as writer:
            writer.write(trace.steps[0])
        again = read_trace(tmp_path / "t.jsonl")
        assert read(tmp_path / "t.jsonl", mean_loss=True).mean_loss
        assert again.header == trace.header
        assert math.isnan(again.steps[0].loss)

    def test_a_field_that_some_steps_lack_is_recorded_and_unknown_there(self, tmp_path):
        trace = read(put(tmp_path / "a.csv", "step,loss,lr,grad_norm\n1,1,0.1,\n2,2,0.1,3\n"))
        assert [record.grad_norm for record in trace.steps] == [None, 3.0]
        assert trace.header.records == ("loss", "lr", "grad_norm")

    def test_a_column_without_a_value_is_not_recorded(self, tmp_path):
        path = put(tmp_path / "a.csv", "step,loss,lr\n1,1,\n2,2,\n")
        assert read(path).header.records == ("loss",)
        assert "lr was mapped to 'lr'" in refused(path, "lr=lr")

    def test_the_digits_of_each_field_are_told(self, tmp_path):
        path = put(tmp_path / "a.csv", f"step,loss,lr\n1,0.1234,{1 / 3}\n2,0.5,{2 / 3}\n3,0.4321,0.5\n")
        assert read(path).precision == {"loss": Precision(decimals=4)}


class TestPairs:
    def test_a_mapping_of_one_side_goes_before_that_of_both(self, tmp_path):
        one, two = (put(tmp_path / name, "step,a,b\n1,5,6\n") for name in ("1.csv", "2.csv"))
        a, b = read_pair(one, two, both=["loss=a"], right=["loss=b"])
        assert (losses(a), losses(b)) == ({1: 5.0}, {1: 6.0})

    def test_a_mapping_of_both_reaches_the_foreign_side_only(self, tmp_path):
        theirs = put(tmp_path / "1.csv", "step,a\n1,5\n")
        with TraceWriter(tmp_path / "t", OWN):
            pass
        for sides in ((theirs, tmp_path / "t"), (tmp_path / "t", theirs)):
            assert {len(trace.steps) for trace in read_pair(*sides, both=["loss=a"])} == {0, 1}
        with pytest.raises(ConfigError, match=r"no column to map \(loss\)"):
            read_pair(theirs, tmp_path / "t", both=["loss=a"], right=["loss=a"])


class TestSteps:
    def test_rows_of_a_step_that_hold_different_columns_are_put_together(self, tmp_path):
        rows = [{"_step": 1, "loss": 0.5}, {"_step": 1, "lr": 0.1}, {"_step": 1, "loss": 0.5, "x": "y"}, {"_step": 1}]
        (record,) = read(put(tmp_path / "a.jsonl", lines(*rows))).steps
        assert (record.loss, record.lr) == (0.5, (0.1,))

    @pytest.mark.parametrize("second", [0.6, math.nan, -0.5])
    def test_two_values_in_one_step_are_refused(self, tmp_path, second):
        path = put(tmp_path / "a.jsonl", lines({"step": 1, "loss": 0.5}, {"step": 1, "loss": second}))
        assert f", line 2: the step has two values of loss ('loss'), 0.5 and {second!r}" in refused(path)

    def test_nan_twice_is_one_value(self, tmp_path):
        path = put(tmp_path / "a.jsonl", lines(*[{"step": 1, "loss": math.nan}] * 2))
        assert math.isnan(read(path).steps[0].loss)

    def test_rows_without_a_wanted_column_need_no_step(self, tmp_path):
        path = put(tmp_path / "a.jsonl", lines({"config": "x"}, {"step": 0, "eval/loss": 9}, {"step": 1, "loss": 0.5}))
        assert losses(read(path)) == {1: 0.5}

    def test_a_value_without_a_step_is_refused(self, tmp_path):
        path = put(tmp_path / "a.jsonl", lines({"step": 1, "loss": 0.5}, {"loss": 0.5}))
        assert ", line 2: the row has values but no step ('step')" in refused(path)

    def test_step_0_is_refused_with_the_shift_that_would_make_it_the_first(self, tmp_path):
        path = put(tmp_path / "a.csv", "n,loss\n0,5\n1,6\n")
        assert "write --map 'step=n+1'" in refused(path, "step=n")
        assert losses(read(path, "step=n+1")) == {1: 5.0, 2: 6.0}
        assert "write --map 'step=n+1'" in refused(path, "step=n-1")

    @pytest.mark.parametrize("text", ["1.5", "nan", "inf", "1e300"])
    def test_a_step_that_is_not_whole_is_refused(self, tmp_path, text):
        assert f", line 2: step ('step') is {text}" in refused(put(tmp_path / "a.csv", f"step,loss\n{text},5\n"))

    def test_a_step_may_be_written_as_a_float(self, tmp_path):
        assert losses(read(put(tmp_path / "a.csv", "step,loss\n1.0,5\n2e0,6\n"))) == {1: 5.0, 2: 6.0}

    def test_steps_out_of_order_are_sorted_and_noted(self, tmp_path):
        trace = read(put(tmp_path / "a.csv", "step,loss\n2,6\n1,5\n"))
        assert [record.step for record in trace.steps] == [1, 2]
        assert "its steps are out of order: they were sorted" in trace.notes
        assert read(put(tmp_path / "b.csv", "step,loss\n1,6\n2,5\n")).notes == ()

    def test_a_file_without_a_step_of_a_wanted_column_is_refused(self, tmp_path):
        assert "write --map loss=COLUMN" in refused(put(tmp_path / "a.jsonl", lines({"step": 1, "eval/loss": 9})))


class TestCsv:
    @given(st.lists(st.floats(), min_size=1, max_size=8))
    @settings(max_examples=60)
    def test_every_float_comes_back_bit_for_bit(self, tmp_path_factory, values):
        path = put(
            tmp_path_factory.mktemp("csv") / "a.csv",
            "step,loss\n" + "".join(f"{n},{x!r}\n" for n, x in enumerate(values, 1)),
        )
        found = [record.loss for record in read(path).steps]
        assert list(map(repr, found)) == list(map(repr, values))

    @pytest.mark.parametrize("text", ["nan", "NaN", "NAN", "-nan"])
    def test_nan_in_any_spelling_is_nan(self, tmp_path, text):
        assert math.isnan(losses(read(put(tmp_path / "a.csv", f"step,loss\n1,{text}\n")))[1])

    @pytest.mark.parametrize(("text", "value"), [("inf", math.inf), ("-Infinity", -math.inf), ("Infinity", math.inf)])
    def test_infinity_in_any_spelling_is_infinite(self, tmp_path, text, value):
        assert losses(read(put(tmp_path / "a.csv", f"step,loss\n1,{text}\n"))) == {1: value}

    @NOT_A_NUMBER
    def test_a_wanted_cell_that_is_no_number_is_named(self, tmp_path, text):
        path = put(tmp_path / "a.csv", f'step,loss\n1,0.5\n2,"{text}"\n')
        assert refused(path) == f", line 3: 'loss' is {text!r}: it must be a number"

    def test_other_cells_may_be_anything(self, tmp_path):
        assert losses(read(put(tmp_path / "a.csv", 'step,loss,note\n1,0.5,"a, ""b""\nc"\n2,0.25,\n'))) == {
            1: 0.5,
            2: 0.25,
        }

    @pytest.mark.parametrize("delimiter", [",", "\t", ";"])
    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_delimiters_newlines_blank_lines_and_a_byte_order_mark_are_taken(self, tmp_path, delimiter, newline):
        rows = [["step", "loss"], ["1", " 0.5 "], [], ["2", "0.25"]]
        text = "".join(delimiter.join(row) + newline for row in rows)
        assert losses(read(put(tmp_path / "a.csv", b"\xef\xbb\xbf" + text.encode()))) == {1: 0.5, 2: 0.25}

    def test_a_last_line_that_was_cut_is_refused(self, tmp_path):
        path = put(tmp_path / "a.csv", "step,loss,lr\n1,0.5,0.1\n2,0.4")
        assert ", line 3: 2 cells where the header has 3: cut short" in refused(path)

    def test_a_last_line_without_its_newline_is_taken_and_noted(self, tmp_path):
        assert any("may have been cut" in note for note in read(put(tmp_path / "a.csv", "step,loss\n1,0.5")).notes)

    @pytest.mark.parametrize("row", ["1", "1,2,3"])
    def test_a_row_of_another_length_is_refused(self, tmp_path, row):
        assert "a row has a cell for each column" in refused(put(tmp_path / "a.csv", f"step,loss\n{row}\n2,1\n"))

    def test_a_column_named_twice_is_refused(self, tmp_path):
        assert "'loss' names 2 columns" in refused(put(tmp_path / "a.csv", "step,loss,loss\n1,2,3\n"))

    def test_an_unclosed_quote_is_refused(self, tmp_path):
        assert "no CSV" in refused(put(tmp_path / "a.csv", 'step,loss\n1,"0.5\n2,0.4\n'))

    def test_a_header_alone_is_refused(self, tmp_path):
        assert "no row with a value" in refused(put(tmp_path / "a.csv", "step,loss\n"))

    def test_a_chart_of_wandb_is_read_by_its_metric(self, tmp_path):
        file = io.StringIO()
        rows = [
            ["Step", "run-7 - train/loss", "run-7 - train/loss__MIN", "run-7 - train/loss__MAX"],
            [1, 0.5, 0.5, 0.5],
        ]
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
        trace = read(put(tmp_path / "wandb_export.csv", file.getvalue()))
        assert (trace.header.engine, losses(trace)) == ("wandb", {1: 0.5})

    def test_a_chart_of_two_runs_is_refused_with_the_option_for_each(self, tmp_path):
        path = put(tmp_path / "a.csv", '"Step","a - loss","b - loss"\n1,2,3\n')
        assert "--map 'loss=a - loss' or --map 'loss=b - loss'" in refused(path)
        assert losses(read(path, "loss=b - loss")) == {1: 3.0}


class TestJson:
    @given(st.lists(st.floats(), min_size=1, max_size=8))
    @settings(max_examples=60)
    def test_every_float_comes_back_bit_for_bit(self, tmp_path_factory, values):
        rows = lines(*({"step": n, "loss": x} for n, x in enumerate(values, 1)))
        found = [record.loss for record in read(put(tmp_path_factory.mktemp("json") / "a", rows)).steps]
        assert list(map(repr, found)) == list(map(repr, values))

    def test_nan_may_be_a_word_and_null_is_absent(self, tmp_path):
        text = '{"step":1,"loss":"NaN","lr":null}\n{"step":2,"loss":"Infinity","lr":0.1}\n'
        first, second = read(put(tmp_path / "a.jsonl", text)).steps
        assert math.isnan(first.loss)
        assert (first.lr, second.loss) == (None, math.inf)

    @pytest.mark.parametrize("value", ["high", True])
    def test_a_wanted_value_that_is_no_number_is_named(self, tmp_path, value):
        path = put(tmp_path / "a.jsonl", lines({"step": 1, "loss": 0.5}, {"step": 2, "loss": value}))
        assert refused(path) == f", line 2: 'loss' is {str(value)!r}: it must be a number"

    def test_zeros_that_fill_a_number_are_seen(self, tmp_path):
        assert read(put(tmp_path / "a.jsonl", '{"step":1,"loss":0.5000}\n')).precision == {
            "loss": Precision(decimals=4)
        }

    def test_a_last_line_cut_anywhere_is_refused(self, tmp_path):
        whole = lines({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}).encode()
        start = whole.index(b"\n") + 1
        for end in range(start + 1, len(whole) - 1):
            assert ", line 2: cut short" in refused(put(tmp_path / "a.jsonl", whole[:end]))

    def test_our_own_steps_without_their_header_are_not_taken_for_another_trainers(self, tmp_path):
        counts = dict.fromkeys(("passes", "idle_passes", "rollouts", "prompts", "tokens"), 1)
        step = StepRecord(step=7, **counts, total=1.0, loss=0.5, lr=(0.1,), grad_norm=1.0)
        path = put(tmp_path / "a.jsonl", step.model_dump_json() + "\n")
        assert refused(path).startswith(", line 1: a step of a ds_parity trace, and not its header")
        logged = {**step.model_dump(), "lr": 0.1, "seconds": 3.0}
        assert [one.loss for one in read(put(tmp_path / "b.jsonl", lines(logged))).steps] == [0.5]

    @pytest.mark.parametrize("line", ["[1]", "3", "null"])
    def test_a_line_that_is_no_object_is_refused(self, tmp_path, line):
        assert ", line 2: " in refused(put(tmp_path / "a.jsonl", f'{{"step":1,"loss":1}}\n{line}\n'))

    def test_a_broken_line_in_the_middle_is_named(self, tmp_path):
        assert ", line 2: no JSON" in refused(
            put(tmp_path / "a.jsonl", '{"step":1,"loss":1}\n{"step"\n{"step":2,"loss":1}\n')
        )

    def test_a_key_that_a_row_has_twice_is_refused_with_two_values_and_taken_with_one(self, tmp_path):
        first = '{"step":1,"loss":1.5}\n'
        path = put(tmp_path / "a.jsonl", first + '{"step":2,"loss":7.5,"lr":1,"loss":3.0}\n')
        assert refused(path) == (
            ", line 2: the row has the key 'loss' twice, with two values: leave the one that is meant"
        )
        assert ", item 1: the row has the key 'loss' twice" in refused(
            put(tmp_path / "a.json", '[{"step":2,"loss":7.5,"loss":3.0}]')
        )
        same = put(tmp_path / "b.jsonl", first + '{"step":2,"loss":3.0,"lr":1,"loss":3.0}\n')
        assert losses(read(same)) == {1: 1.5, 2: 3.0}
        nested = put(tmp_path / "c.jsonl", '{"step":1,"loss":1.5,"of":{"a":1,"a":2}}\n')
        assert losses(read(nested)) == {1: 1.5}

    def test_an_array_of_rows_is_read(self, tmp_path):
        rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
        assert losses(read(put(tmp_path / "a.json", json.dumps(rows, indent=1)))) == {1: 0.5, 2: 0.25}
        assert ", item 2: " in refused(put(tmp_path / "b.json", json.dumps([rows[0], 3])))

    def test_the_history_of_wandb_is_known_by_its_step(self, tmp_path):
        rows = [{"_step": 1, "_runtime": 2.0, "_timestamp": 1e9, "train/loss": 0.5, "_wandb": {"runtime": 3}}]
        trace = read(put(tmp_path / "history.jsonl", lines(*rows)))
        assert (trace.header.engine, losses(trace)) == ("wandb", {1: 0.5})


class TestNested:
    def read(self, tmp_path, *rows, maps=()):
        return read(put(tmp_path / "a.jsonl", lines(*rows)), *maps)

    def test_the_learning_rates_of_a_scheduler_are_those_of_the_parameter_groups(self, tmp_path):
        """`scheduler.get_last_lr()` is a list, and so is the lr of ds_parity's own traces."""
        trace = self.read(tmp_path, {"step": 1, "loss": 1.5, "lr": [1e-4]}, {"step": 2, "loss": 1.5, "lr": [2e-4, 3.5]})
        assert [one.lr for one in trace.steps] == [(1e-4,), (2e-4, 3.5)]
        assert trace.notes == ()

    def test_a_list_of_one_number_is_that_number_in_every_field(self, tmp_path):
        trace = self.read(tmp_path, {"step": [3], "loss": [1.5], "n": [7]}, maps=["tokens=n"])
        assert [(one.step, one.loss, one.tokens) for one in trace.steps] == [(3, 1.5, 7)]

    @pytest.mark.parametrize(
        ("name", "cell", "what"),
        [
            ("lr", {"group 0": 1e-4}, "objects"),
            ("lr", [], "lists without a number"),
            ("lr", [[1e-4]], "lists of other things than numbers"),
            ("lr", [1e-4, None], "lists of other things than numbers"),
            ("loss", [1.5, 2.5], "lists of several numbers"),
            ("grad_norm", {"total": 2.0}, "objects"),
        ],
    )
    def test_what_is_nested_otherwise_is_named_and_refused_where_it_was_asked_for(self, tmp_path, name, cell, what):
        row = {"step": 1, "loss": 1.5, "lr": 1e-4, "grad_norm": 1.0, name: cell}
        trace = self.read(tmp_path, row)
        assert trace.notes == (f"the column {name!r} holds {what}, which are not read",)
        assert getattr(trace.steps[0], name) is None
        message = refused(tmp_path / "a.jsonl", f"{name}={name}")
        assert f"{name} was mapped to {name!r}, which holds {what}: " in message
        assert f"write --map {name}= to leave it out" in message
        assert read(tmp_path / "a.jsonl", f"{name}=").notes == ()

    def test_what_is_nested_in_some_rows_only_is_unknown_there_and_named(self, tmp_path):
        trace = self.read(tmp_path, {"step": 1, "loss": 1.5, "lr": 1e-4}, {"step": 2, "loss": 1.5, "lr": {"a": 1e-4}})
        assert [one.lr for one in trace.steps] == [(1e-4,), None]
        assert trace.notes == ("the column 'lr' holds objects in some rows, which are not read",)

    def test_a_nested_column_does_not_stand_in_the_way_of_one_that_can_be_read(self, tmp_path):
        assert self.read(tmp_path, {"step": 1, "loss": [1, 2], "train_loss": 0.5}).steps[0].loss == 0.5

    def test_other_columns_may_be_nested_without_a_word(self, tmp_path):
        assert self.read(tmp_path, {"step": 1, "loss": 0.5, "weights": {"norm": 1}, "ids": [1, 2]}).notes == ()

    @pytest.mark.parametrize(
        ("row", "name"), [({"step": {"n": 1}, "loss": 0.5}, "step"), ({"step": 1, "loss": {"mean": 1}}, "loss")]
    )
    def test_a_file_that_has_nothing_else_is_refused_with_what_it_has(self, tmp_path, row, name):
        message = refused(put(tmp_path / "a.jsonl", lines(row)))
        assert f"the column {name!r} holds objects, which are not read" in message

    def test_two_lists_in_one_step_are_refused(self, tmp_path):
        rows = [{"step": 1, "loss": 0.5, "lr": [1e-4, 1e-3]}, {"step": 1, "lr": [1e-4, 2e-3]}]
        assert "two values of lr ('lr'), [0.0001, 0.001] and [0.0001, 0.002]" in refused(
            put(tmp_path / "a.jsonl", lines(*rows))
        )


class TestDetection:
    def test_our_own_trace_is_read_as_ours(self, tmp_path):
        with TraceWriter(tmp_path / "t", OWN):
            pass
        assert read_any(tmp_path / "t").header == OWN

    @pytest.mark.parametrize("text", ['{"schema_version":2}\n', '{"schema_version":1,"scen'])
    def test_a_fault_in_our_own_is_told_as_such(self, tmp_path, text):
        assert refused(put(tmp_path / "t.csv", text)).startswith(", line 1: ")

    def test_the_name_of_a_file_does_not_decide(self, tmp_path):
        assert read(put(tmp_path / "a.log", "step,loss\n1,2\n")).header.engine == "csv"
        assert read(put(tmp_path / "a.csv", '{"step":1,"loss":1}\n')).header.engine == "json lines"

    @pytest.mark.parametrize("text", ["", " \n\n"])
    def test_an_empty_file_is_refused(self, tmp_path, text):
        assert "the file is empty" in refused(put(tmp_path / "a.csv", text))

    def test_a_missing_file_and_a_folder_without_a_trace_are_refused(self, tmp_path):
        assert "No such file" in refused(tmp_path / "none")
        assert "a directory without event files" in refused(tmp_path)

    def test_a_binary_file_is_refused(self, tmp_path):
        assert "a binary file" in refused(put(tmp_path / "a.csv", b"\x89PNG\r\n\0\0\x01"))
        assert "no text in UTF-8" in refused(put(tmp_path / "b.csv", b"step,loss\n1,\xff\xfe\n"))
        assert "no text in UTF-8" in refused(put(tmp_path / "c", b"\xff\xfe,\n"))

    @pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a"])
    def test_words_are_refused(self, tmp_path, name):
        assert ", line 1: " in refused(put(tmp_path / name, "hello\n"))

    @pytest.mark.parametrize("text", ['{"a": 1', '{\n "a": 1\n}\n', '[{"step": 1', "{" * 100_000, "[" * 100_000])
    def test_json_that_is_cut_or_holds_no_history_is_refused(self, tmp_path, text):
        assert refused(put(tmp_path / "a.json", text))

    @given(st.binary(max_size=200))
    @settings(max_examples=300)
    def test_any_bytes_at_all_are_read_or_refused_by_name(self, tmp_path_factory, content):
        path = put(tmp_path_factory.mktemp("any") / "a", content)
        assert read_or_named(path)

    @given(st.text(st.sampled_from('step,loss\n\r"{}[]:;\t 01.eNan'), max_size=120))
    @settings(max_examples=500)
    def test_anything_like_a_trace_is_read_or_refused_by_name(self, tmp_path_factory, text):
        path = put(tmp_path_factory.mktemp("any") / "a", "step,loss\n" + text)
        assert read_or_named(path)


def test_reading_imports_neither_torch_nor_tensorboard_where_no_event_file_asks_for_it(tmp_path):
    path = put(tmp_path / "a.csv", "step,loss\n1,0.5\n")
    code = f"import sys; from ds_parity.trace.foreign import read_any; read_any({str(path)!r}); "
    code += "sys.exit(bool({'torch', 'deepspeed', 'tensorboard', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_long_file_with_many_columns_is_streamed(tmp_path, kind):
    names = ["step", "loss", *(f"layer {n}" for n in range(100))]
    path = tmp_path / f"a.{kind}"
    with path.open("w") as file:
        file.write(",".join(names) + "\n" if kind == "csv" else "")
        for step in range(1, 2_001):
            values = [step, 0.5, *(step / 7 + n for n in range(100))]
            row = ",".join(map(str, values)) if kind == "csv" else json.dumps(dict(zip(names, values, strict=True)))
            file.write(row + "\n")
    tracemalloc.start()
    try:
        assert len(read(path).steps) == 2_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 3_000_000
    assert peak < 4_500_000  # measured 3.4e6, most of it the steps
