"""train_online.py in ranks that are forked, started with little work, and what can be done to it while it runs."""

import contextlib
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from pathlib import Path

import psutil
import torch

from ds_parity.parity.running.launch import free_port
from ds_parity.parity.running.left_behind import free_shared_memory

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "train_online.py"
# Four groups of four rollouts make a step, and nothing is warmed up.
SMALL = ["--deepspeed_config", "small.json", "--level", "0", "--group", "4", "--batch", "2", "--micro_batch", "8"]


def rank(environment, arguments, folder):
    """What a rank runs: the script as the launcher would start it, its output in log.txt."""
    os.environ.update(environment)
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), *arguments]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


class OnlineRun:
    """One start on some ranks, a context manager. When a rank dies, the others are ended, as the launcher does."""

    def __init__(self, folder, *options, output="out", ranks=2, stage=2):
        folder.mkdir(exist_ok=True)
        config = json.loads((ROOT / "tools" / "online" / "ds_config.json").read_text())
        config["gradient_accumulation_passes"] = 16
        config["zero_optimization"]["stage"] = stage
        # In the folder, which has space when a disk for the output is full.
        self.trace = folder / "trace.jsonl"
        config["ds_parity"]["trace"] = str(self.trace)
        (folder / "small.json").write_text(json.dumps(config))
        self.folder, self.output, self.port = folder, folder / output, free_port()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": str(ranks)}
        environment |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(["tests.tools.online_runs", "deepspeed", "ds_parity.engine.initialize"])
        self.processes = []
        for number in range(ranks):
            own = {**environment, "RANK": str(number), "LOCAL_RANK": str(number)}
            given = [f"--local_rank={number}", "--output", str(output), *SMALL, *map(str, options)]
            self.processes.append(forking.Process(target=rank, args=(own, given, str(folder))))
            self.processes[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.actors_now = self.actors()
        for process in self.processes:
            process.kill()
            process.join()
        free_shared_memory(self.port)
        gone = wait_until(lambda: not self.actors(), 30)
        for one in self.actors():
            one.kill()
        assert gone, "actors have outlived their run"

    def actors(self):
        """The processes of the actors, whoever started them."""
        found = []
        for process in psutil.process_iter(["cmdline", "cwd"]):
            words = process.info["cmdline"] or []
            if any(word.endswith("online/actor.py") for word in words) and process.info["cwd"] == str(self.folder):
                found.append(process)
        return found

    def code(self):
        """The greatest exit code, None while a rank runs."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else max(map(abs, codes))

    def wait(self, seconds):
        """The exit code; where a rank has failed, the other is ended after ten seconds."""
        limit = time.monotonic() + seconds
        while self.code() is None and time.monotonic() < limit:
            if any(process.exitcode for process in self.processes):
                wait_until(lambda: self.code() is not None, 10)
                for process in self.processes:
                    process.kill()
                    process.join()
            time.sleep(0.02)
        return self.code()

    def steps(self):
        """The number of steps in the trace."""
        return self.trace.read_bytes().count(b"\n") - 1 if self.trace.exists() else -1

    def until(self, steps, seconds=120):
        """Wait for so many steps, or for the end; whether they were reached."""
        limit = time.monotonic() + seconds
        while self.steps() < steps and self.code() is None:
            assert time.monotonic() < limit, self.said()
            if any(process.exitcode for process in self.processes):
                return False
            time.sleep(0.02)
        return self.steps() >= steps

    def said(self):
        """The end of the log."""
        return (self.folder / "log.txt").read_text(errors="replace")[-4000:]


def wait_until(reached, seconds):
    """Whether it was reached in time."""
    limit = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def small_disk(path, size):
    """A disk of its own at `path`; None where it can't be made."""
    import subprocess

    path.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False)
    try:
        yield None if mounted.returncode else path
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "-l", path], check=True)
        shutil.rmtree(path, ignore_errors=True)
