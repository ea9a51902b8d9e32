"""Traces that gzip has packed, and traces that come through a pipe: the same as the file, or an error in a sentence."""

import errno
import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ds_parity.errors import TraceError
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.trace import iter_steps, opening, read_trace
from ds_parity.trace.columns import TraceFile
from ds_parity.trace.foreign import open_pair, read_any
from tests.parity.comparison.comparing import on_disk, record, trace

STEPS = 700


@pytest.fixture
def plain(tmp_path):
    long = trace(*(record(step, loss=0.5 + step / 7) for step in range(1, STEPS + 1)))
    return on_disk(tmp_path / "plain.jsonl", long).path


@pytest.fixture
def packed(plain, tmp_path):
    path = tmp_path / "packed.jsonl.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def through_a_pipe(data):
    """A path that can be read only once."""
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "wb") as file:
            file.write(data)

    threading.Thread(target=write, daemon=True).start()
    return f"/dev/fd/{reading}"


def test_a_packed_trace_is_the_trace(plain, packed):
    assert read_trace(packed) == read_trace(plain)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_pipe_is_read_once_and_compared_to_the_end(plain, pack):
    a, b = open_pair(plain, through_a_pipe(pack(plain.read_bytes())))
    assert isinstance(b, TraceFile)
    comparison = compare(a, b, Tier.REASSOCIATED)
    assert comparison.equal
    assert comparison.steps == STEPS


def test_two_pipes_are_two_traces(plain):
    data = plain.read_bytes()
    other = data.replace(b'"tokens":100', b'"tokens":101', 1)
    assert compare(*open_pair(*map(through_a_pipe, (data, other))), Tier.EXACT).count == 1


def test_a_pipe_that_cannot_be_copied_is_said_each_time(plain, monkeypatch):
    """What it had is gone by then, so that whoever opens it next would find it empty."""
    pipe = through_a_pipe(plain.read_bytes())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(opening.shutil, "copyfileobj", full)
    for _ in range(2):
        with pytest.raises(TraceError, match=r"a pipe is copied to .* failed \(No space left .* set TMPDIR"):
            read_any(pipe)


def test_a_pipe_that_cannot_be_opened_is_not_told_of_room(plain, monkeypatch):
    pipe = through_a_pipe(plain.read_bytes())
    whole = Path.open

    def closed(path, *args):
        if path == Path(pipe):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path, *args)

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises((OSError, TraceError)) as told:
        read_any(pipe)
    assert "Permission denied" in str(told.value)
    assert "TMPDIR" not in str(told.value)


def test_a_byte_order_mark_before_a_trace_is_left_out(plain, tmp_path):
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_trace(marked) == read_trace(plain)
    assert compare(*open_pair(plain, marked), Tier.EXACT).equal


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_without_an_end_is_no_text_from_its_start_on(plain, device):
    code = "import sys\nfrom ds_parity.trace.foreign import open_pair\nopen_pair(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(plain), device]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert f"TraceError: {device}: a binary file" in ran.stderr


def test_one_pipe_for_both_sides_is_refused(plain):
    pipe = through_a_pipe(plain.read_bytes())
    with pytest.raises(TraceError, match="both traces are this one pipe"):
        open_pair(pipe, pipe)


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_a_packed_trace_that_is_cut_short_is_an_error_that_says_so(packed, kept):
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(TraceError, match=r"packed.jsonl.gz: the gzip data are cut short"):
        compare(*open_pair(packed, packed), Tier.EXACT)


def test_a_packed_trace_that_is_damaged_is_an_error_that_says_so(packed):
    data = bytearray(packed.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    packed.write_bytes(data)
    with pytest.raises(TraceError, match=r"packed.jsonl.gz"):
        list(iter_steps(packed))


def test_what_was_whole_in_a_pipe_that_ends_in_mid_line_is_an_error_that_says_so(plain):
    pipe = through_a_pipe(plain.read_bytes()[:-9])
    with pytest.raises(TraceError, match=f"line {STEPS + 1}: cut short"):
        compare(*open_pair(plain, pipe), Tier.EXACT)


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("step,loss\n1,0.5\n2,0.25\n", "csv"),
        ('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n', "json lines"),
        ('{"log_history": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]}', "transformers"),
    ],
)
def test_the_run_of_another_trainer_is_read_packed_and_from_a_pipe(tmp_path, text, engine):
    (tmp_path / "run.gz").write_bytes(gzip.compress(text.encode()))
    for path in (tmp_path / "run.gz", through_a_pipe(text.encode())):
        found = read_any(path)
        assert (found.header.engine, [one.loss for one in found.steps]) == (engine, [0.5, 0.25])


@pytest.mark.slow
def test_memory_does_not_grow_with_what_comes_through_a_pipe(tmp_path, plain):
    head, *lines = plain.read_bytes().splitlines(keepends=True)
    code = (
        "import resource, sys\n"
        "from ds_parity.parity.comparison.bounds import Tier\n"
        "from ds_parity.parity.comparison.compare import compare\n"
        "from ds_parity.trace.foreign import open_pair\n"
        "assert compare(*open_pair('/dev/stdin', sys.argv[1]), Tier.EXACT).equal\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for count in (30_000, 150_000):
        path = tmp_path / "long.jsonl"
        line = lines[0].replace(b'"step":1,', b'"step":%d,')
        with path.open("wb") as file:
            file.write(head)
            file.writelines(line % step for step in range(1, count + 1))
        with path.open("rb") as file:
            writer = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
            command = [sys.executable, "-c", code, str(path)]
            ran = subprocess.run(command, stdin=writer.stdout, capture_output=True, check=True, timeout=250)
            writer.wait(timeout=60)
        peaks.append(int(ran.stdout.split()[-1]) / 1024)
    assert path.stat().st_size > 50e6
    assert peaks[1] - peaks[0] < 8  # MiB, of a pipe of 50 MB more
