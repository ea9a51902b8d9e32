"""Starting ranks with the `deepspeed` launcher, watching them, and leaving none behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_parity.errors import HarnessError
from ds_parity.parity.running.compiling import Compilers
from ds_parity.parity.running.functions import working_folder
from ds_parity.parity.running.job_folder import CALLS, LOG, emptied, written_by
from ds_parity.parity.running.last_words import last_words
from ds_parity.parity.running.left_behind import free_shared_memory

# Characters of what a rank has said.
_MOST_SAID = 600
_PORTS, _TRIES = range(10_240, 32_768), 50

# Torch takes an empty one for the current folder (cpp_extension.py and _appdirs.py, 2.13.0), and would leave what it
# builds among the user's files. Without the variable it builds in the user's cache, as the XDG base directory
# specification asks of an empty variable too.
_NEVER_EMPTY = ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Call:
    """One thing that every rank does: `package.module:function` with plain keyword arguments."""

    title: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Calls for one launched set of ranks.

    Attributes:
        calls: run in order on every rank.
        folder: of the log and of what ranks write, results included; what an earlier job left goes first.
        ranks: processes to start.
        timeout: seconds for the whole job.
        import_from: folders in which functions are looked up beside the installed packages.
        environment: variables set for the ranks.
        patience: seconds for a single call, compiling DeepSpeed's operators aside; None: as long as the job.
    """

    calls: tuple[Call, ...]
    folder: Path
    ranks: int = 2
    timeout: float = 600.0
    import_from: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    patience: float | None = None


def run_job(job: Job, progress: Callable[[int, str], None] = lambda done, title: None) -> list[Any]:
    """Start the ranks, run the job, return the first rank's results in the order of the calls.

    Ranks have this process's environment. An empty TORCH_EXTENSIONS_DIR or XDG_CACHE_HOME is dropped from it, because
    torch would compile DeepSpeed's operators into the current folder.

    Args:
        job: what to run.
        progress: called with the number of calls that have finished, and the title of the one that runs.

    Raises:
        HarnessError: there is no launcher, a rank failed or died, or time ran out. No process is left behind.
    """
    # Known here, because the shared memory that DeepSpeed leaves behind carries it in its name.
    port = free_port()
    command, environment = _command(job, port), _environment(job)
    compilers = Compilers(environment, lambda: _waited_for(job))
    with (job.folder / LOG).open("w") as log:
        # Nothing is written to their input: it ends with this process, and the ranks with it (worker.py).
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        compilers.session = process.pid
        try:
            code = _watch(process, job, compilers, progress)
        finally:
            _end(process)
            free_shared_memory(port)
    results = [line["result"] for line in said(job.folder, 0) if "finished" in line]
    # A function may end its process, with code 0 too.
    if code != 0 or len(results) < len(job.calls):
        raise HarnessError(_why(job, code))
    return results


def said(folder: Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield what a rank has written so far.

    These are lines with `started`, `finished` or `failed` (the number of a call), or `waits_for` (the lock of a
    compiler).
    """
    path = folder / written_by(rank)
    if path.exists():
        yield from _parsed(path.read_bytes())


def _parsed(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # it is being written, or a full disk has cut it
            yield json.loads(line)


def _command(job: Job, port: int) -> list[str]:
    launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or shutil.which("deepspeed")
    if launcher is None:
        raise HarnessError(
            f"no `deepspeed` launcher beside {sys.executable} or on PATH: ranks are started with it; install deepspeed "
            "into this environment"
        )
    path = emptied(job.folder) / CALLS
    path.write_text(
        json.dumps({"import_from": [*job.import_from, working_folder()], "calls": [vars(call) for call in job.calls]})
    )
    # A port of its own: two jobs on one machine would meet at the default one.
    accelerators = ["--num_accelerators", str(job.ranks), "--master_port", str(port)]
    return [sys.executable, launcher, *accelerators, "--module", "ds_parity.parity.running.worker", str(path)]


def _environment(job: Job) -> dict[str, str]:
    environment = {**os.environ, **job.environment}
    environment = {name: value for name, value in environment.items() if value or name not in _NEVER_EMPTY}
    # Ranks that each take all cores wait for each other in every operator.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.ranks)))
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products on CUDA ask for
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*job.import_from, environment.get("PYTHONPATH", "")]))
    return environment


def free_port() -> int:
    """Return a port of this host on which nothing listens now.

    It is none of those that Linux gives to connections (ip_local_port_range, from 32768 on): one of another run would
    take it between its choice here and its use.

    Raises:
        OSError: no port can be opened.
    """
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"{_TRIES} ports from {_PORTS.start} to {_PORTS.stop - 1} are in use")


def _watch(
    process: subprocess.Popen[bytes], job: Job, compilers: Compilers, progress: Callable[[int, str], None]
) -> int:
    begun = last_heard = time.monotonic()
    heard = _Heard(job.folder)
    while process.poll() is None:
        news = heard.listen()
        now = time.monotonic()
        compilers.look(now)
        # A compiler at work is progress too, though no rank says so.
        if news or compilers.running:
            last_heard = now
        if now - begun > job.timeout:
            raise HarnessError(
                f"the ranks did not finish within {job.timeout:g} s ({_where(job)}): they were ended; look at "
                f"{job.folder / 'log.txt'}, or allow more time{compilers.blame}"
            )
        # Before the first call the ranks import DeepSpeed, which takes long and says nothing.
        if job.patience is not None and heard.lines and now - last_heard > job.patience:
            raise HarnessError(
                f"the ranks said nothing for {job.patience:g} s ({_where(job)}): they hang, and were ended; look at "
                f"{job.folder / 'log.txt'}{compilers.blame}"
            )
        progress(heard.finished, heard.title + compilers.aside)
        time.sleep(0.1)
    return process.returncode


class _Heard:
    """What the first rank has said so far. Each line is read once: results make the file long, and looks are many.

    Attributes:
        lines: how many there are.
        finished: calls that have finished.
        title: of the call that was begun last.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._read = folder / "rank0.jsonl", 0
        self.lines = self.finished = 0
        self.title = "starting ranks"

    def listen(self) -> bool:
        """Read on; return whether anything was new."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
        if not whole:
            return False
        self._read += len(whole) + 1
        for line in _parsed(whole):
            self.lines += 1
            self.finished += "finished" in line
            self.title = line["title"] if "started" in line else self.title
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    # The launcher and its ranks are a process group of their own; whatever is left of it goes.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _where(job: Job) -> str:
    titles = [line["title"] for line in said(job.folder, 0) if "started" in line]
    return f"in {titles[-1]!r}" if titles else "before the first call"


def _waited_for(job: Job) -> set[str]:
    return {line["waits_for"] for rank in range(job.ranks) for line in said(job.folder, rank) if "waits_for" in line}


def _fell_silent(folder: Path, rank: int) -> bool:
    lines = [line for line in said(folder, rank) if "waits_for" not in line]
    return not lines or "started" in lines[-1]


def _why(job: Job, code: int) -> str:
    log = job.folder / LOG
    failures = [
        (line["at"], rank, line) for rank in range(job.ranks) for line in said(job.folder, rank) if "failed" in line
    ]
    if failures:
        # The first to fail is the cause; what the others say is that it is gone.
        _, rank, line = min(failures, key=lambda failure: failure[:2])
        title = job.calls[line["failed"]].title
        silent = [str(other) for other in range(job.ranks) if _fell_silent(job.folder, other)]
        others = f"; rank {', '.join(silent)} ended without saying why: killed, or by the launcher" if silent else ""
        return f"rank {rank} failed in {title!r}: {line['error']}: {_short(line['message'])}{others} (log: {log})"
    return (
        f"a rank ended with code {code} {_where(job)} without saying why: it was killed, or could not start; the log "
        f"{log} says: {last_words(log)}"
    )


def _short(message: str) -> str:
    # torch lists all of its operators where one lacks a kernel; the log has it whole.
    return message if len(message) <= _MOST_SAID else f"{message[:_MOST_SAID]} ..."
