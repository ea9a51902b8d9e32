"""Training scripts under the launcher, as a user starts them: watched, stopped, killed, and what they leave behind."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from ds_parity.parity.running.launch import free_port
from ds_parity.parity.running.left_behind import free_shared_memory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READY = ROOT / "ds_configs"
SMALL = ["--model", "tests.tools.noted:build", "--rollouts", "rollouts.jsonl", "--max_tokens", "96"]


def write_rollouts(path, prompts=28):
    """Four short answers a prompt, one in three right, no two alike."""
    with path.open("w") as file:
        for index in range(prompts * 4):
            prompt, answer = f"{index // 4} + 1 = ", f"{'so ' * (index * 7 % 11)}{index}"
            file.write(json.dumps({"prompt": prompt, "completion": answer, "reward": int(index % 3 == 0)}) + "\n")


class Started:
    """One start of a script in `folder`, in a process group of its own; use it as a context manager.

    Ranks note what they train on in `folder`, attempt by attempt, and log into log.txt.
    """

    def __init__(self, folder, attempt, *options, script="train_grpo.py", config=READY / "zero2_bf16.json", hosts=None):
        folder.mkdir(exist_ok=True)
        write_rollouts(folder / "rollouts.jsonl")
        self.folder, self.port = folder, free_port()
        paths = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {"NOTED_SCRIPT": str(ROOT / "tools" / script), "NOTED_TO": str(folder), "PYTHONPATH": paths}
        environment |= {"NOTED_ATTEMPT": str(attempt), "OMP_NUM_THREADS": "1"}
        chosen = ["--deepspeed_config", str(config), "--output", "out", *SMALL, *options]
        launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--master_port", str(self.port)]
        if hosts is None:
            launcher += ["--num_accelerators", "2"]
        else:
            launcher = hosts.inside(0, *launcher, *hosts.options)
            exported = {**environment, "GLOO_SOCKET_IFNAME": "eth0"}
            (folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in exported.items()))
            environment |= hosts.environment
        self.log = folder / "log.txt"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*launcher, str(HERE / "noted.py"), *chosen],
                **{"stdout": log, "stderr": subprocess.STDOUT, "env": {**os.environ, **environment}},
                cwd=folder,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        free_shared_memory(self.port)

    def code(self):
        """The exit code, None while it runs."""
        return self.process.poll()

    def ranks(self):
        """The processes of the ranks, by their number."""
        ranks = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    given = [word for word in process.cmdline() if word.startswith("--local_rank=")]
                    if given:
                        ranks[int(given[0].split("=")[1])] = process
        return ranks

    def wait(self, seconds):
        """The launcher's exit code; None where it is still running after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)

    def until(self, reached, seconds=120):
        """Wait until `reached()`, or until the launcher has ended; whether it was reached."""
        limit = time.monotonic() + seconds
        while not reached() and self.code() is None:
            assert time.monotonic() < limit, self.said()
            time.sleep(0.02)
        return reached()

    def kill(self, rank, patience=8):
        """kill -9 one rank, and after `patience` what the launcher left of the others; whether that rank was there."""
        process = self.ranks().get(rank)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait(patience)
        return process is not None

    def steps(self):
        """The number of steps in the trace."""
        trace = self.folder / "out" / "trace.jsonl"
        return trace.read_bytes().count(b"\n") - 1 if trace.exists() else -1

    def said(self):
        """The end of the log."""
        return self.log.read_text(errors="replace")[-3000:]


class Forked(Started):
    """The same without the launcher, forked from a process that has imported everything: a start takes a second or two.

    When a rank dies the others get SIGTERM, and are killed soon after, as the launcher does.
    """

    def __init__(self, folder, attempt, *options, script="train_grpo.py", config=READY / "zero2_bf16.json"):
        folder.mkdir(exist_ok=True)
        write_rollouts(folder / "rollouts.jsonl")
        self.folder, self.port, self.log = folder, free_port(), folder / "log.txt"
        environment = {
            "NOTED_SCRIPT": str(ROOT / "tools" / script),
            "NOTED_TO": str(folder),
            "NOTED_ATTEMPT": str(attempt),
        }
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        chosen = ["--deepspeed_config", str(config), "--output", "out", *SMALL, *options]
        from tests.tools import noted  # with torch

        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(
            ["tests.tools.noted", "trainer", "deepspeed", "ds_parity.engine.initialize", "ds_parity.collation"]
        )
        self._ranks = []
        for rank in range(2):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (own, [f"--local_rank={rank}", *chosen], str(folder))
            self._ranks.append(forking.Process(target=noted.rank, args=arguments))
            self._ranks[-1].start()

    def __exit__(self, *_):
        for process in self._ranks:
            process.kill()
            process.join()
        free_shared_memory(self.port)

    def code(self):
        codes = [process.exitcode for process in self._ranks]
        return None if None in codes else max(map(abs, codes))

    def ranks(self):
        return {n: psutil.Process(process.pid) for n, process in enumerate(self._ranks) if process.is_alive()}

    def wait(self, seconds):
        limit = time.monotonic() + seconds
        while self.code() is None and time.monotonic() < limit:
            dead = [process for process in self._ranks if process.exitcode]
            if dead:
                return self._tidy()
            time.sleep(0.02)
        return self.code()

    def _tidy(self):
        for process in self._ranks:
            process.terminate()
        for process in self._ranks:
            process.join(2)
            process.kill()
            process.join()
        return self.code()


def trained_on(folder, ranks=2):
    """The rollouts that each step was really made of, where attempts followed each other: {window: Counter}.

    An attempt begins at its checkpoint; what the attempt before it did from there on does not count.
    """
    lines = [json.loads(line) for rank in range(ranks) for line in (folder / f"rank{rank}.jsonl").open()]
    begun = {}
    for line in lines:
        begun[line["attempt"]] = min(line["window"], begun.get(line["attempt"], line["window"]))
    windows = {}
    for line in lines:
        if all(line["window"] < start for attempt, start in begun.items() if attempt > line["attempt"]):
            windows.setdefault(line["window"], Counter()).update(line["held"])
    return windows
