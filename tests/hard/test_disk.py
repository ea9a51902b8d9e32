"""A disk that fills up while a trace is written: training goes on, it is said once, and what is left can be read."""

import subprocess

import pytest

from ds_parity.trace import read_trace


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
    told = forks.run("tests.hard.disk:fill", 2, 120, folder=str(small_disk), windows=15)
    assert [one.how for one in told] == ["returned"] * 2, told
    (said, steps), (nothing, others) = (one.value for one in told)
    assert (steps, others) == (45, 45)
    assert said.count("the trace ends here, training goes on") == 1
    assert "No space left on device" in said
    assert nothing == ""
    # Once there is space again no step is written: those between would be missing.
    assert 15 <= len(read_trace(small_disk / "trace.jsonl").steps) < 30


def test_a_trace_that_cannot_be_begun_ends_every_rank_at_once(forks, small_disk):
    (small_disk / "filler").write_bytes(bytes(64 * 1024))
    told = forks.run("tests.hard.disk:fill", 2, 60, folder=str(small_disk / "new"), windows=1)
    assert "TraceError" in told[0].error
    assert told[1].error.startswith("RankDesyncError: this rank stops because others did: rank 0 raised TraceError")
