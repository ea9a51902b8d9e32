"""A disk that fills up while a trace is written: training goes on, it is said once, and what is left can be read."""

import io
import logging
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from ds_parity.trace import read_trace
from tests.distributed.cells import config
from tests.distributed.engines import build, one_pass


def fill(rank, folder, windows):
    """Train for some windows, then with a full disk, then with space again, `windows` each.

    Returns:
        What was said, and the optimizer steps taken.
    """
    said, filler = io.StringIO(), Path(folder) / "filler"
    logging.getLogger("ds_parity").addHandler(logging.StreamHandler(said))
    engine = build(config(2, passes=4, trace=f"{folder}/trace.jsonl"))
    for number in range(6 * windows):  # a window has 2 passes
        if rank == 0 and number == 2 * windows:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if rank == 0 and number == 4 * windows:
            filler.unlink()
        one_pass(engine, number)
    return [said.getvalue(), engine.global_steps]


@pytest.fixture
def small_disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs a small disk of its own, which only root may mount")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_training_goes_on_it_is_said_once_and_the_trace_ends_with_a_whole_line(forks, small_disk):
    outcomes = forks.run(fill, 2, 120, folder=str(small_disk), windows=15)
    assert [one.how for one in outcomes] == ["returned"] * 2, outcomes
    (said, steps), (nothing, others) = (one.value for one in outcomes)
    assert (steps, others) == (45, 45)
    assert said.count("the trace ends here, training goes on") == 1
    assert "No space left on device" in said
    assert nothing == ""
    # Once there is space again no step is written: those between would be missing.
    assert 15 <= len(read_trace(small_disk / "trace.jsonl").steps) < 30


def test_a_trace_that_cannot_be_begun_ends_every_rank_at_once(forks, small_disk):
    (small_disk / "filler").write_bytes(bytes(64 * 1024))
    outcomes = forks.run(fill, 2, 60, folder=str(small_disk / "new"), windows=1)
    assert "TraceError" in outcomes[0].error
    assert outcomes[1].error.startswith("RankDesyncError: this rank stops because others did: rank 0 raised TraceError")
