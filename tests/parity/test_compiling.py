"""Waiting for compilers: those that run are waited for and named, the lock of one that was killed is pointed at."""

import os
import sys
import time
from pathlib import Path

import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity import launch
from ds_parity.parity.compiling import compilation
from ds_parity.parity.launch import Call, Job, run

# A launcher whose one rank begins a call, holds a lock for a while or finds one, and ends it.
_RANK = """
import json, sys, time
from pathlib import Path
folder, lock, held, quiet = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
said = (folder / "rank0.jsonl").open("w", buffering=1)
said.write(json.dumps({"started": 0, "title": "a call"}) + "\\n")
if held:
    lock.touch()
    time.sleep(held)
    lock.unlink()
time.sleep(quiet)
said.write(json.dumps({"finished": 0, "result": 7}) + "\\n")
"""


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "extensions" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def started(tmp_path, lock, monkeypatch):
    """Runs the rank above, with a patience of a second; returns its results and the titles that were told."""

    def start(held=0.0, quiet=0.0, timeout=60.0):
        folder = tmp_path / "ranks"
        folder.mkdir()
        command = [sys.executable, "-c", _RANK, str(folder), str(lock), str(held), str(quiet)]
        monkeypatch.setattr(launch, "_command", lambda job, port: command)
        environment = {"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}
        job = Job((Call("a call", "x:y"),), folder, 1, timeout, environment=environment, patience=1.0)
        titles = []
        return run(job, lambda done, title: titles.append(title)), titles

    return start


class TestLocks:
    def test_none_where_nothing_is_compiled_and_where_no_folder_is(self, lock, tmp_path):
        assert compilation({"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}) is None
        assert compilation({"TORCH_EXTENSIONS_DIR": str(tmp_path / "nowhere")}) is None

    @pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
    def test_found_where_torch_compiles_by_default(self, variable, tmp_path, monkeypatch):
        """As torch itself says where that is."""
        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, str(tmp_path))
        from torch.utils import cpp_extension

        (tmp_path / ".cache").mkdir()
        lock = Path(cpp_extension._get_build_directory("cpu_lion", verbose=False), "lock")
        lock.touch(exist_ok=False)
        found = compilation(os.environ)
        assert found is not None
        assert found.lock.samefile(lock)
        assert found.operator == "cpu_lion"

    def test_the_oldest_is_told_first(self, lock):
        lock.touch()
        older = lock.parents[1] / "fused_adam" / "lock"
        older.parent.mkdir()
        older.touch()
        os.utime(older, (1000, 1000))
        assert compilation({"TORCH_EXTENSIONS_DIR": str(lock.parents[1])}).lock == older


class TestWaiting:
    def test_a_compiler_that_runs_is_named_and_taken_for_no_hang(self, started):
        results, titles = started(held=2.5)
        assert results == [7]
        assert "a call; torch compiles DeepSpeed's cpu_adam, once a machine" in titles

    def test_silence_without_a_compiler_is_a_hang(self, started):
        with pytest.raises(HarnessError, match=r"said nothing for 1 s \(in 'a call'\): they hang.*log.txt$"):
            started(quiet=20)

    def test_silence_behind_a_lock_from_before_is_a_hang_and_names_the_lock(self, started, lock):
        lock.touch()
        os.utime(lock, (time.time() - 100,) * 2)
        with pytest.raises(HarnessError, match=rf"they hang.*cpu_adam that began before them.* delete {lock}$"):
            started(quiet=20)

    def test_time_that_runs_out_while_compiling_is_said(self, started):
        with pytest.raises(HarnessError, match=r"did not finish within 1 s .* torch compiles DeepSpeed's cpu_adam"):
            started(held=20, timeout=1.0)
