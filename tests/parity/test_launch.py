"""Starting ranks: what is said when they can't start, die or hang, and that none is left behind."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from ds_parity.errors import HarnessError
from ds_parity.parity.running import launch
from ds_parity.parity.running.launch import Call, Job, run_job

HERE = str(Path(__file__).parent)


def job(folder, function, *, ranks=2, timeout=120, **arguments):
    return Job((Call(function, f"launched:{function}", arguments),), folder / "ranks", ranks, timeout, (HERE,))


def left_behind(folder):
    """Processes whose command line names the job; one that was killed may take a moment to go."""
    mark, deadline = str(folder), time.monotonic() + 5
    while True:
        left = [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


class TestAFreePort:
    def test_is_none_that_a_connection_may_take(self):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert max(launch._PORTS) < min(low, 32_768)
        assert {launch.free_port() for _ in range(20)} <= set(launch._PORTS)

    def test_is_none_that_is_in_use(self, monkeypatch):
        monkeypatch.setattr(launch, "_TRIES", 2)
        taken = launch.free_port()
        with socket.socket() as other:
            other.bind(("", taken))
            monkeypatch.setattr(launch, "_PORTS", (taken, free := launch.free_port()))
            assert {launch.free_port() for _ in range(20)} == {free}
            monkeypatch.setattr(launch, "_TRIES", 1)
            monkeypatch.setattr(launch, "_PORTS", range(taken, taken + 1))
            with pytest.raises(OSError, match="1 ports from"):
                launch.free_port()

    def test_that_cannot_be_opened_says_why(self, monkeypatch):
        def refused(*_):
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(socket.socket, "bind", refused)
        with pytest.raises(PermissionError):
            launch.free_port()


@pytest.mark.ranks
def test_results_come_back_in_order_and_progress_is_told(tmp_path, monkeypatch):
    seen = []
    calls = tuple(Call(f"call {n}", "launched:echo", {"value": n, "seconds": 0.3}) for n in range(3))
    port = launch.free_port()
    monkeypatch.setattr(launch, "free_port", lambda: port)
    # A harness that is ended between its ranks and their launcher frees nothing: ranks that end as they should do.
    monkeypatch.setattr(launch, "free_shared_memory", lambda port: None)
    # Time enough for DeepSpeed to compile its ops, once a machine; the tests below find them compiled.
    results = run_job(Job(calls, tmp_path / "ranks", 2, 300, (HERE,)), lambda done, title: seen.append((done, title)))
    assert results == [0, 1, 2]
    assert not buffers(port), "DeepSpeed's buffers of 66 MB a rank were left in memory"
    assert (0, "starting ranks") in seen
    assert any(done and title.startswith("call") for done, title in seen)
    assert not left_behind(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_an_exception_on_one_rank_is_named_with_its_rank_and_ends_the_others(tmp_path, monkeypatch):
    port = launch.free_port()
    monkeypatch.setattr(launch, "free_port", lambda: port)
    with pytest.raises(HarnessError, match=r"rank 1 failed in 'fail': ValueError: 7 is not what rank 1 wanted"):
        run_job(job(tmp_path, "fail", rank=1))
    assert not left_behind(tmp_path)
    assert not buffers(port)


@pytest.fixture(scope="module")
def by_the_clock(tmp_path_factory):
    """The folders and the results to come of two jobs that wait more than they work, side by side."""
    hang, threads = (tmp_path_factory.mktemp(name) for name in ("hang", "threads"))
    with ThreadPoolExecutor(2) as pool:
        # Other ranks run beside them, and they may be up only after half of the time.
        yield {
            "hang": (hang, pool.submit(run_job, job(hang, "hang", timeout=60))),
            "threads": (threads, pool.submit(run_job, job(threads, "leave_threads", into=str(threads)))),
        }


@pytest.mark.ranks
@pytest.mark.slow
def test_threads_may_end_and_are_not_waited_for_longer(by_the_clock):
    """One sleeps for 10 minutes, one writes a file a second behind the last call, and one is an idle pool's."""
    folder, to_come = by_the_clock["threads"]
    assert to_come.result() == ["left"]
    assert sorted(path.name for path in folder.glob("late*")) == ["late0", "late1"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("way", ["sys.exit", "os._exit"])
def test_a_function_that_ends_its_process_is_no_result(tmp_path, way):
    """With code 0, which a launcher takes for an end as it should be."""
    told = {
        "sys.exit": r"rank \d failed in 'leave': SystemExit: it has called sys.exit\(0\)",
        "os._exit": r"a rank ended with code 0 in 'leave' without saying why",
    }
    with pytest.raises(HarnessError, match=told[way]):
        run_job(job(tmp_path, "leave", way=way))
    assert not left_behind(tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_is_killed_ends_in_a_clear_error_inside_the_time_limit(tmp_path):
    begun = time.monotonic()
    # The launcher looks once a second, and then kills the other rank, which may not have told of its lost peer by then.
    told = (
        r"rank 1 ended without saying why: killed|a rank ended with code \d+ in 'die' without saying why: it was killed"
    )
    with pytest.raises(HarnessError, match=told):
        run_job(job(tmp_path, "die", rank=1))
    assert time.monotonic() - begun < 120
    assert not left_behind(tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_is_ahead_of_the_first_dies_in_the_call_that_kills_it(tmp_path):
    """The first rank's answer to the call before is neither lost nor named as the cause."""
    calls = (Call("slow", "launched:late", {"rank": 0}), Call("deadly", "launched:die", {"rank": 1}))
    job = Job(calls, tmp_path / "ranks", 2, 120, (HERE,))
    with pytest.raises(HarnessError, match="in 'deadly'"):
        run_job(job)
    assert [line["result"] for line in launch.said(job.folder, 0) if "finished" in line] == ["here"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_function_may_destroy_the_group_as_a_script_does_at_its_end(tmp_path):
    calls = Call("first", "launched:destroy", {}), Call("last", "launched:echo", {"value": "there"})
    assert run_job(Job(calls, tmp_path / "ranks", 2, 120, (HERE,))) == ["destroyed", "there"]


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_hang_are_ended_when_the_time_is_up(by_the_clock):
    folder, to_come = by_the_clock["hang"]
    with pytest.raises(HarnessError, match=r"did not finish within 60 s \(in 'hang'\): they were ended"):
        to_come.result()
    assert not left_behind(folder)


def test_a_launcher_that_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(HarnessError, match=r"no `deepspeed` launcher beside .* install deepspeed"):
        run_job(job(tmp_path, "echo", value=1))


def test_an_interrupted_run_leaves_no_process(tmp_path, monkeypatch, request):
    """Ctrl-C while the ranks start."""
    monkeypatch.setattr(launch, "_command", lambda job, port: [sys.executable, "-c", _SLEEPER, str(tmp_path)])
    (tmp_path / "ranks").mkdir()
    # A shell that starts a job in the background lets it ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupt(done, title):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path, "echo", value=1), interrupt)
    assert not left_behind(tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_whose_harness_was_killed_end_by_themselves(tmp_path):
    """SIGKILL leaves it no time to end them: `timeout -s KILL`, or a machine without memory."""
    script = f"""
from pathlib import Path
from ds_parity.parity.running.launch import Call, Job, run_job
run_job(Job((Call("hang", "launched:hang"),), Path({str(tmp_path / "ranks")!r}), 2, 300, ({HERE!r},)))
"""
    harness = subprocess.Popen([sys.executable, "-c", script])
    begun = [tmp_path / "ranks" / f"rank{rank}.jsonl" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(path.exists() and "started" in path.read_text() for path in begun):
        assert harness.poll() is None, "the harness ended before its ranks were up"
        assert time.monotonic() < deadline, "the ranks were not up within 120 s"
        time.sleep(0.2)
    port = launched_port(tmp_path)
    assert port is not None
    harness.kill()
    harness.wait()
    assert not left_behind(tmp_path)
    assert not buffers(port)


def buffers(port):
    return list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


def launched_port(folder):
    """The port of a job's ranks, which is in the launcher's command line."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    found = [
        line[line.index("--master_port") + 1]
        for line in lines
        if str(folder) in " ".join(line) and "--master_port" in line
    ]
    return found[0] if found else None


_SLEEPER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
time.sleep(60)
"""


class TestALineThatIsBeingWritten:
    def test_is_passed_over(self, tmp_path):
        (tmp_path / "rank0.jsonl").write_text(json.dumps({"started": 0}) + '\n{"fin')
        assert list(launch.said(tmp_path, 0)) == [{"started": 0}]

    def test_is_heard_once_it_is_whole_and_every_line_once(self, tmp_path):
        heard = launch._Heard(tmp_path)
        assert (heard.listen(), heard.title) == (False, "starting ranks")
        with (tmp_path / "rank0.jsonl").open("w", buffering=1) as says:
            says.write(json.dumps({"started": 0, "title": "größer"}) + '\n{"finished": 0')
            assert [heard.listen() for _ in range(2)] == [True, False]
            assert (heard.lines, heard.finished, heard.title) == (1, 0, "größer")
            says.write(', "result": 1}\n' + json.dumps({"started": 1, "title": "next"}) + "\n")
            assert [heard.listen() for _ in range(2)] == [True, False]
        assert (heard.lines, heard.finished, heard.title) == (3, 1, "next")
