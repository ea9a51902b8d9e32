"""Trace files: whole lines out, and every fault named with its file and line on the way in."""

import re
import resource
import subprocess
import sys
import tracemalloc
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_parity.errors import TraceError
from ds_parity.trace import Header, StepRecord, Trace, TraceWriter, end_of_step, iter_steps, read_header, read_trace

HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="ds_parity")


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        passes=2,
        idle_passes=0,
        rollouts=2,
        prompts=1,
        tokens=9,
        total=2.0,
        loss=0.1,
        lr=(1e-3,),
        grad_norm=1.0,
    )


def write(path, steps):
    with TraceWriter(path, HEADER) as writer:
        for step in steps:
            writer.write(record(step))
    return path


def fails(path, line, words):
    place = f"{path}, line {line}: " if line else f"{path}: "
    with pytest.raises(TraceError, match=re.escape(place) + f".*{words}"):
        read_trace(path)


def test_what_is_written_is_what_is_read_and_folders_are_made(tmp_path):
    path = write(tmp_path / "a" / "b" / "trace.jsonl", [1, 2, 3])
    assert read_trace(path) == Trace(HEADER, (record(1), record(2), record(3)))
    assert read_header(path) == HEADER


def test_a_trace_without_steps_can_be_read(tmp_path):
    assert read_trace(write(tmp_path / "t", [])).steps == ()


def test_each_line_is_whole_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "t"
    writer = TraceWriter(path, HEADER)
    assert read_trace(path).steps == ()
    writer.write(record(1))
    assert path.read_bytes().endswith(b"}\n")
    assert read_trace(path).steps == (record(1),)
    writer.close()


def test_a_run_that_dies_leaves_its_finished_steps(tmp_path):
    def run():
        with TraceWriter(tmp_path / "t", HEADER) as writer:
            writer.write(record(1))
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        run()
    assert len(read_trace(tmp_path / "t").steps) == 1


def test_a_trace_that_cannot_be_made_names_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}/file/t")):
        TraceWriter(tmp_path / "file" / "t", HEADER)
    with pytest.raises(TraceError, match=re.escape(str(tmp_path))):
        TraceWriter(tmp_path, HEADER)


@contextmanager
def files_of_at_most(size):
    """What this process writes beyond `size` bytes of a file fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_leaves_the_steps_that_were_whole_wherever_in_a_line_it_was_full(tmp_path):
    path = write(tmp_path / "whole", [1, 2, 3])
    ends = [at + 1 for at, byte in enumerate(path.read_bytes()) if byte == ord("\n")]
    for size in range(ends[1], ends[3]):
        writer = TraceWriter(tmp_path / "t", HEADER)
        with files_of_at_most(size), pytest.raises(TraceError, match=re.escape(f"{tmp_path}/t: can't write the trace")):
            deque(map(writer.write, map(record, (1, 2, 3))))
        writer.close()
        assert len(read_trace(tmp_path / "t").steps) == sum(end <= size for end in ends) - 1


def test_a_trace_that_was_cut_takes_no_more_steps_when_there_is_space_again(tmp_path):
    """One would be missing in the middle."""
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.write(record(1))
    with files_of_at_most((tmp_path / "t").stat().st_size + 10), pytest.raises(TraceError):
        writer.write(record(2))
    with pytest.raises(TraceError, match="step 3 was written after the trace was closed"):
        writer.write(record(3))
    assert read_trace(tmp_path / "t").steps == (record(1),)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which this system lacks")
def test_a_full_disk_at_the_header_is_a_trace_error_that_names_the_path():
    with pytest.raises(TraceError, match="/dev/full: can't write the trace: No space left"):
        TraceWriter("/dev/full", HEADER)


class TestGoingOnBehindAStep:
    """What a resumed run does with the trace of the run before."""

    def go_on(self, path, step, steps):
        with TraceWriter(path, HEADER, end_of_step(path, step)) as writer:
            for number in steps:
                writer.write(record(number))

    @pytest.mark.parametrize("step", [0, 1, 2, 3])
    def test_what_was_written_after_it_is_replaced_and_the_file_is_that_of_one_run(self, tmp_path, step):
        path, whole = write(tmp_path / "t", [1, 2, 3]), write(tmp_path / "whole", [1, 2, 3, 4])
        self.go_on(path, step, range(step + 1, 5))
        assert path.read_bytes() == whole.read_bytes()

    def test_a_line_that_was_cut_short_anywhere_is_replaced(self, tmp_path):
        path, whole = write(tmp_path / "t", [1, 2]), write(tmp_path / "whole", [1, 2]).read_bytes()
        start = whole.rindex(b"\n", 0, -1) + 1
        for end in range(start, len(whole)):
            path.write_bytes(whole[:end])
            self.go_on(path, 1, [2])
            assert path.read_bytes() == whole

    def test_a_trace_without_a_step_goes_on_anywhere(self, tmp_path):
        path = write(tmp_path / "t", [])
        self.go_on(path, 5, [6])
        assert [one.step for one in read_trace(path).steps] == [6]

    def test_a_trace_that_ends_before_the_step_is_not_gone_on_with(self, tmp_path):
        assert end_of_step(write(tmp_path / "t", [1, 2]), 3) is None

    @pytest.mark.parametrize("content", ["", "{}\n", "not json\n", '{"schema_version": 1', '{"step": 1}\n'])
    def test_what_is_no_trace_is_not_gone_on_with(self, tmp_path, content):
        (tmp_path / "t").write_text(content)
        assert end_of_step(tmp_path / "t", 0) is None
        assert end_of_step(tmp_path / "none", 0) is None

    def test_begins_anew_on_a_device_which_may_never_end(self):
        assert end_of_step("/dev/zero", 0) is None

    def test_what_can_not_be_read_is_a_trace_error(self, tmp_path):
        with pytest.raises(TraceError, match=re.escape(f"{tmp_path}: can't read")):
            end_of_step(tmp_path, 0)


def test_writing_after_close_is_refused_and_closing_twice_is_not(tmp_path):
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="step 1 was written after the trace was closed"):
        writer.write(record(1))


def test_a_missing_file_a_folder_and_an_empty_file_are_named(tmp_path):
    fails(tmp_path / "none", None, "No such file")
    fails(tmp_path, None, "directory")
    (tmp_path / "empty").write_text("")
    fails(tmp_path / "empty", None, "empty")


@pytest.mark.parametrize("line", ["{}", "[]", "3", "not json", "", '{"step": 1}', "\xff"])
def test_a_first_line_that_is_no_header_is_refused(tmp_path, line):
    path = tmp_path / "t"
    path.write_text(line + "\n" + record(1).model_dump_json() + "\n", encoding="latin-1")
    fails(path, 1, "no header")


def test_steps_without_a_header_are_refused(tmp_path):
    path = tmp_path / "t"
    path.write_text(record(1).model_dump_json() + "\n")
    fails(path, 1, "no header")


@pytest.mark.parametrize("version", ["2", "0", "null", '"1"'])
def test_another_schema_version_is_refused_with_both_versions(tmp_path, version):
    path = write(tmp_path / "t", [1])
    path.write_text(path.read_text().replace('"schema_version":1', f'"schema_version":{version}'))
    fails(path, 1, "schema version .* reads 1")


def test_a_header_with_a_fault_names_the_key(tmp_path):
    path = write(tmp_path / "t", [1])
    path.write_text(path.read_text().replace('"ranks":1', '"ranks":0'))
    fails(path, 1, "ranks: .*greater than or equal to 1, got 0")


def test_a_last_line_cut_anywhere_is_refused(tmp_path):
    path = write(tmp_path / "t", [1, 2])
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        fails(path, 3, "cut short")


def test_a_last_line_that_lacks_only_its_newline_is_whole(tmp_path):
    path = write(tmp_path / "t", [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_trace(path).steps) == 2


def test_an_invalid_record_names_its_line_key_and_value(tmp_path):
    path = write(tmp_path / "t", [1, 2, 3])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace('"tokens":9', '"tokens":-9'), lines[3]]))
    fails(path, 3, "tokens: .*got -9")


@pytest.mark.parametrize(
    ("line", "says"), [("", "an empty line, .*: remove it"), ("{}", ""), ("null", ""), ('{"step":2', "")]
)
def test_a_line_that_is_no_record_is_refused(tmp_path, line, says):
    path = write(tmp_path / "t", [1])
    path.write_text(path.read_text() + line + "\n")
    fails(path, 3, says)


@pytest.mark.parametrize(
    ("steps", "line", "words"),
    [
        ([1, 2, 2, 3], 4, "step 2 is doubled"),
        ([1, 2, 4], 4, "step 3 is missing"),
        ([1, 3, 2], 3, "step 2 is missing"),
        ([2, 1], 3, "step 1 is out of order"),
    ],
)
def test_steps_that_are_doubled_missing_or_out_of_order_are_refused(tmp_path, steps, line, words):
    fails(write(tmp_path / "t", steps), line, words)


def test_a_resumed_run_may_begin_at_a_later_step(tmp_path):
    assert [item.step for item in iter_steps(write(tmp_path / "t", [6, 7]))] == [6, 7]


def test_good_steps_before_a_fault_are_still_streamed(tmp_path):
    steps = iter_steps(write(tmp_path / "t", [1, 2, 2]))
    assert [next(steps).step, next(steps).step] == [1, 2]
    with pytest.raises(TraceError, match="doubled"):
        next(steps)


@pytest.mark.slow
def test_a_long_trace_streams_in_flat_memory(tmp_path):
    path = tmp_path / "t"
    line = record(1).model_dump_json()
    with path.open("w") as file:
        file.write(HEADER.model_dump_json() + "\n")
        file.writelines(line.replace('"step":1', f'"step":{step}') + "\n" for step in range(1, 50_001))
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_steps(path)) == 50_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 5_000_000
    assert peak < 500_000


def test_the_trace_room_imports_neither_torch_nor_deepspeed():
    code = "import sys, ds_parity.trace; sys.exit(bool({'torch', 'deepspeed'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
