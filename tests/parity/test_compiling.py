"""Waiting for compilers: those that run are waited for and named, the lock of one that was killed is pointed at."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity.running import compiling, launch
from ds_parity.parity.running.compiling import Compilers
from ds_parity.parity.running.launch import Call, Job, run_job

# A launcher whose one rank begins a call, holds a lock for a while or is silent, and ends it.
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
if len(sys.argv) > 5:
    said.write(json.dumps({"waits_for": sys.argv[5]}) + "\\n")
time.sleep(quiet)
said.write(json.dumps({"finished": 0, "result": 7}) + "\\n")
"""


def put(root, extension="cpu_adam"):
    path = root / extension / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=False)
    return path


def watching(root):
    """Compilers, whose looks are a second apart; returns a function that looks once more and gives them."""
    compilers, clock = Compilers({"TORCH_EXTENSIONS_DIR": str(root)}), iter(range(1000))

    def look(times=1):
        for _ in range(times):
            compilers.look(float(next(clock)))
        return compilers

    return look


class TestWhatLiesThere:
    def test_nothing_is_told_where_nothing_is_compiled_and_where_no_folder_is(self, tmp_path):
        for root in (tmp_path, tmp_path / "nowhere"):
            seen = watching(root)(10)
            assert (seen.running, seen.aside, seen.blame) == (False, "", "")

    def test_what_is_compiled_since_the_start_is_named_after_a_moment(self, tmp_path):
        """A lock is held for a moment at every load, also where nothing is to be compiled."""
        look = watching(tmp_path)
        lock = put(tmp_path)
        assert look().running
        assert look().aside == ""
        assert look(5).aside == "; torch compiles cpu_adam, once a machine"
        lock.unlink()
        assert (look().running, look().aside) == (False, "")

    def test_a_lock_from_before_may_be_waited_for_and_is_no_compiler_that_runs(self, tmp_path):
        lock = put(tmp_path)
        look = watching(tmp_path)
        assert not look().running
        assert look().aside.endswith(f"if no compiler runs, it was killed; delete {lock}")

    def test_an_old_lock_does_not_hide_a_compiler_that_runs(self, tmp_path):
        put(tmp_path, "async_io")
        look = watching(tmp_path)
        put(tmp_path)
        assert look(7).running
        assert look().aside == "; torch compiles cpu_adam, once a machine"

    def test_which_came_first_is_not_read_off_the_file_servers_clock(self, tmp_path):
        """It may be hours behind, or ahead."""
        old = put(tmp_path, "async_io")
        os.utime(old, (4e9, 4e9))
        look = watching(tmp_path)
        assert not look().running
        os.utime(put(tmp_path), (1000, 1000))
        assert look().running

    def test_a_lock_that_was_made_anew_in_its_old_place_is_a_new_one(self, tmp_path):
        lock = put(tmp_path)
        look = watching(tmp_path)
        lock.unlink()
        (tmp_path / "other").touch()  # so that the inode isn't taken again
        put(tmp_path)
        assert look().running

    def test_a_lock_that_goes_while_it_is_looked_at_is_passed_over(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Path, "glob", lambda root, pattern: [root / "gone" / "lock"])
        assert Compilers({"TORCH_EXTENSIONS_DIR": str(tmp_path)})._locks() == []

    @pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
    def test_it_is_looked_for_where_torch_compiles_by_default(self, variable, tmp_path, monkeypatch):
        """As torch itself says where that is; other Pythons' folders are their own."""
        from torch.utils import cpp_extension

        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, str(tmp_path))
        (tmp_path / ".cache").mkdir()
        lock = Path(cpp_extension._get_build_directory("cpu_lion", verbose=False), "lock")
        environment = dict(os.environ)
        monkeypatch.setenv("HOME", "/nowhere")
        compilers = Compilers(environment)
        lock.touch(exist_ok=False)
        python = lock.parents[1].name.partition("_")[0]
        for another in ("py27_cu80", f"{python}_cu80", f"{python}_rocm60"):
            put(lock.parents[2] / another, "another")
        (found,) = compilers._locks()
        assert found.path.samefile(lock)
        assert found.extension == "cpu_lion"

    @pytest.mark.parametrize("name", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
    def test_an_empty_folder_is_the_current_one_as_torch_takes_it(self, name, tmp_path, monkeypatch):
        """Torch asks whether the variable is there, not whether it says anything."""
        from torch.utils import cpp_extension

        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.chdir(tmp_path)
        compilers = Compilers(dict(os.environ))
        lock = Path(cpp_extension._get_build_directory("cpu_lion", verbose=False), "lock").absolute()
        assert lock.is_relative_to(tmp_path)
        lock.touch()
        (found,) = compilers._locks()
        assert found.path.samefile(lock)


def test_a_process_compiles_while_it_has_a_lock_open(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = put(tmp_path)
    assert not compiling.compiles_itself()
    with lock.open():
        assert compiling.compiles_itself()
    assert not compiling.compiles_itself()


class TestNothingIsBuiltInTheCurrentFolder:
    """Where ds_parity itself starts ranks: an empty variable is dropped, and torch takes its usual folder."""

    @pytest.mark.parametrize("name", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
    @pytest.mark.parametrize("by_job", [True, False])
    def test_an_empty_folder_does_not_reach_the_ranks(self, name, by_job, tmp_path, monkeypatch):
        monkeypatch.setenv(name, "" if not by_job else str(tmp_path))
        job = Job((), tmp_path, environment={name: ""} if by_job else {})
        assert name not in launch._environment(job)

    def test_a_folder_that_is_named_reaches_them(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        assert launch._environment(Job((), tmp_path))["TORCH_EXTENSIONS_DIR"] == str(tmp_path)

    def test_torch_builds_elsewhere_then(self, tmp_path, monkeypatch):
        """As torch itself says, in a process with the ranks' environment; it makes the folder that it names."""
        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "here").mkdir()
        asks = "from torch.utils import cpp_extension as c; print(c._get_build_directory('cpu_lion', False))"
        environment = launch._environment(Job((), tmp_path))
        command, here = [sys.executable, "-c", asks], tmp_path / "here"
        ran = subprocess.run(command, env=environment, cwd=here, capture_output=True, text=True, check=True)
        assert list(here.iterdir()) == []
        assert Path(ran.stdout.strip()).is_relative_to(tmp_path / "home")


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs the rank above, with a patience of a second; returns its results and the titles that were told."""

    def start(held=0.0, quiet=0.0, timeout=60.0, waits_for=()):
        folder, lock = tmp_path / "ranks", tmp_path / "extensions" / "cpu_adam" / "lock"
        folder.mkdir()
        lock.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", _RANK, str(folder), str(lock), str(held), str(quiet), *waits_for]
        monkeypatch.setattr(launch, "_command", lambda job, port: command)
        monkeypatch.setattr(compiling, "_A_MOMENT", 0.5)
        environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
        job = Job((Call("a call", "x:y"),), folder, 1, timeout, environment=environment, patience=1.5)
        titles = []
        return run_job(job, lambda done, title: titles.append(title)), titles

    return start


@pytest.mark.slow
class TestWaiting:
    def test_a_compiler_that_runs_is_named_and_taken_for_no_hang(self, started, tmp_path):
        put(tmp_path / "extensions", "async_io")
        results, titles = started(held=4)
        assert results == [7]
        assert "a call; torch compiles cpu_adam, once a machine" in titles

    def test_silence_without_a_compiler_is_a_hang(self, started):
        with pytest.raises(HarnessError, match=r"said nothing for 1.5 s \(in 'a call'\): they hang.*log.txt$"):
            started(quiet=20)

    def test_silence_behind_a_lock_from_before_is_a_hang_and_names_the_lock(self, started, tmp_path):
        lock = put(tmp_path / "extensions")
        with pytest.raises(HarnessError, match=rf"they hang.*cpu_adam wait for .* killed; delete {lock}$"):
            started(quiet=20)

    def test_time_that_runs_out_while_compiling_names_the_lock_that_is_left(self, started, tmp_path):
        lock = tmp_path / "extensions" / "cpu_adam" / "lock"
        with pytest.raises(HarnessError, match=rf"within 1 s .* compiling cpu_adam, which is ended too: delete {lock}"):
            started(held=20, timeout=1.0)
        assert lock.exists()


# Another environment: it makes a lock as torch does (torch/utils/file_baton.py), and keeps it open for a while.
_OTHER = """
import os, sys, time
held = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
time.sleep(float(sys.argv[2]))
os.close(held)
os.remove(sys.argv[1])
"""


@pytest.mark.slow
class TestAnotherEnvironmentThatCompiles:
    """It shares the folder with the ranks, and begins after they were started."""

    @pytest.fixture
    def beside(self, tmp_path, monkeypatch):
        """Starts the other environment as soon as the ranks run; returns a function of (seconds) and the lock."""
        lock, started = tmp_path / "extensions" / "fused_adam" / "lock", []
        lock.parent.mkdir(parents=True)

        def after(seconds):
            command = [sys.executable, "-c", _OTHER, str(lock), str(seconds)]
            popen = subprocess.Popen

            def both(*args, **kwargs):
                monkeypatch.setattr(subprocess, "Popen", popen)
                ranks = popen(*args, **kwargs)
                started.append(popen(command, start_new_session=True))
                return ranks

            monkeypatch.setattr(subprocess, "Popen", both)
            return lock

        yield after
        for process in started:
            process.kill()
            process.wait()

    def test_is_no_progress_of_ranks_that_hang(self, started, beside):
        beside(15)
        begun = time.monotonic()
        with pytest.raises(HarnessError, match=r"said nothing for 1.5 s \(in 'a call'\): they hang.*log.txt$"):
            started(quiet=12)
        assert time.monotonic() - begun < 8

    def test_is_waited_for_by_ranks_that_say_so(self, started, beside):
        lock = beside(20)  # longer than the silence, whichever process starts late
        results, titles = started(quiet=4, waits_for=[str(lock)])
        assert results == [7]
        assert "a call; torch compiles fused_adam, once a machine" in titles

    def test_that_is_killed_is_no_progress_any_more(self, started, beside, monkeypatch):
        """Its lock stays, and nobody holds it."""
        monkeypatch.setattr(sys.modules[__name__], "_OTHER", _OTHER.replace("os.close(held)", "os._exit(1)"))
        lock = beside(2)
        with pytest.raises(HarnessError, match="they hang"):
            started(quiet=12, waits_for=[str(lock)])
        assert lock.exists()
