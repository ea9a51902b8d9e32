"""Ranks made by fork: a start costs a second where the launcher takes ten, so that ranks may die by the hundred.

A server of its own imports torch and DeepSpeed once and runs nothing; each run is forked from it. What the ranks do is
as real as under the launcher: processes of their own, gloo, DeepSpeed's engines, and the interpreter's own end.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
# A first rank compiles DeepSpeed's operators. Ended while it does, it leaves a lock that all later runs wait for.
START = 600.0


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: it `returned`, `raised`, `exited` or had to be ended because it `hung`."""

    how: str
    value: object = None
    seconds: float = 0.0

    @property
    def error(self):
        """Class and message of what it raised, "" where it raised nothing."""
        return self.value if self.how == "raised" else ""


class Forks:
    """A server that forks ranks; use it as a context manager."""

    def __init__(self):
        paths = [ROOT, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.hard.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def run(self, function, ranks, timeout, **arguments):
        """Run a function of a module on every rank; return an Outcome a rank. No rank is left behind.

        Args:
            function: called as function(rank, **arguments).
            ranks: processes.
            timeout: seconds after which those that still run are ended, counted from when all have started.
            arguments: plain values.
        """
        name = f"{function.__module__}:{function.__name__}"
        request = {"function": name, "ranks": ranks, "timeout": timeout, "arguments": arguments}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of the forks ended with code {self._server.wait()}")
        return [Outcome(**one) for one in json.loads(answer)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        try:
            self._server.wait(2 * START)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)


def serve():
    """Answer requests, a line each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # So that forks have them, and that what they print is no answer.
    import deepspeed  # noqa: F401
    import pytest  # noqa: F401
    import torch

    from ds_parity.parity.running.launch import free_port
    from ds_parity.parity.running.left_behind import free_shared_memory

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        folder, port = Path(tempfile.mkdtemp()), free_port()  # no context: ranks would leave it, too
        children = [_fork(rank, request, port, folder) for rank in range(request["ranks"])]
        outcomes = _wait(children, request["timeout"], folder)
        free_shared_memory(port)
        shutil.rmtree(folder)
        answers.write(json.dumps(outcomes) + "\n")
        answers.flush()


def _fork(rank, request, port, folder):
    child = os.fork()
    if child:
        return child
    # From here on it is a rank, and ends as any script does.
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stream == 0 else log, stream)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "LOCAL_SIZE": request["ranks"]}
    os.environ.update(
        {name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    sys.exit(_be_rank(rank, request, folder))


def _be_rank(rank, request, folder):
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo")
    (folder / f"started{rank}").touch()
    module, name = request["function"].split(":")
    begun = time.monotonic()

    def say(how, value):
        seconds = time.monotonic() - begun
        (folder / f"said{rank}").write_text(json.dumps({"how": how, "value": value, "seconds": seconds}))

    try:
        value = getattr(importlib.import_module(module), name)(rank, **request["arguments"])
    except SystemExit as error:
        say("exited", error.code)
        raise
    except Exception as error:
        say("raised", f"{type(error).__name__}: {error}")
        raise
    say("returned", value)
    return 0


def _wait(children, timeout, folder):
    running, until, started = dict(enumerate(children)), time.monotonic() + START, False
    while running and time.monotonic() < until:
        if not started and all((folder / f"started{rank}").exists() for rank in range(len(children))):
            until, started = time.monotonic() + timeout, True
        for rank, child in list(running.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del running[rank]
        time.sleep(0.02)
    for child in running.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [_outcome(folder, rank, rank in running) for rank in range(len(children))]


def _outcome(folder, rank, hung):
    log = (folder / f"log{rank}").read_text(errors="replace")[-2000:]
    if hung:
        return {"how": "hung", "value": log}
    said = folder / f"said{rank}"
    return json.loads(said.read_text()) if said.exists() else {"how": "died", "value": log}


if __name__ == "__main__":
    serve()
