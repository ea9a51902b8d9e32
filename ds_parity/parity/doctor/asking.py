"""Asking processes that have torch and DeepSpeed in them: what is installed, and whether two ranks can talk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_parity.parity.doctor.findings import Finding, State
from ds_parity.parity.running.compiling import Compilers
from ds_parity.parity.running.launch import free_port

_INQUIRY = str(Path(__file__).with_name("inquiry.py"))
_WAYS_OUT = {
    "torch": "pip install torch",
    "deepspeed": "pip install deepspeed, into the environment of this Python",
}


@dataclass(frozen=True)
class Reply:
    """What a process said, and how it ended.

    Attributes:
        facts: its lines.
        code: its exit code; None where its time was up.
        last: the last line of its standard error.
    """

    facts: tuple[dict[str, Any], ...]
    code: int | None
    last: str


def package(name: str) -> tuple[Finding, str | None]:
    """Return whether a package is there, and its version."""
    if find_spec(name) is None:
        return Finding(name, State.UNKNOWN, f"{name} is not installed for {sys.executable}", _WAYS_OUT[name]), None
    try:
        there = version(name)
    except PackageNotFoundError:
        return Finding(name, State.PERHAPS, f"{name} is there, but not as an installed package"), "unknown"
    return Finding(name, State.FINE, f"{name} {there}"), there


def ask(commands: Sequence[Sequence[str]], environment: Mapping[str, str], limit: float) -> list[Reply]:
    """Run processes beside each other, each a command of inquiry.py; none is left behind.

    Args:
        commands: arguments of each.
        environment: for all of them.
        limit: seconds for all together; time in which torch compiles something does not count.
    """
    compilers = Compilers(environment)
    running = [
        subprocess.Popen(
            [sys.executable, _INQUIRY, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=dict(environment), start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        left, before = limit, time.monotonic()
        while any(process.poll() is None for process in running) and left > 0:
            time.sleep(0.05)
            now = time.monotonic()
            compilers.look(now)
            left -= 0 if compilers.running else now - before
            before = now
        return [_answer(process) for process in running]
    finally:
        for process in running:
            end(process)


def _answer(process: subprocess.Popen[str]) -> Reply:
    code = process.poll()
    end(process)
    out, err = process.communicate()
    facts = [json.loads(line.removeprefix("doctor:")) for line in out.splitlines() if line.startswith("doctor:")]
    lines = [line for line in err.splitlines() if line.strip()]
    return Reply(tuple(facts), code, lines[-1].strip() if lines else "")


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, with all that it has started there."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def accelerator(environment: Mapping[str, str], limit: float = 120.0) -> tuple[Finding, dict[str, Any]]:
    """Return what DeepSpeed takes for the accelerator, by importing it in a process of its own, and the facts."""
    (answer,) = ask([["installed"]], environment, limit)
    if answer.facts:
        facts = answer.facts[0]
        said = f"accelerator: {facts['devices']} x {facts['accelerator']}, which talks over {facts['backend']}"
        if not facts["devices"]:
            way_out = (
                "look for a device that the driver, or CUDA_VISIBLE_DEVICES, hides; on CPUs set DS_ACCELERATOR=cpu"
            )
            return Finding("accelerator", State.BITES, f"{said}: no rank has a device, and none starts", way_out), facts
        return Finding("accelerator", State.FINE, said), facts
    if answer.code is None:
        said = f"`import deepspeed` did not end within {limit:g} s, compiling aside"
        return Finding("accelerator", State.UNKNOWN, said, "look for a lock of a killed compile below"), {}
    said = f"`import deepspeed` fails: {answer.last or f'it ended with code {answer.code}'}"
    return Finding("accelerator", State.UNKNOWN, said, "mend that first: no engine can be built"), {}


def ranks_talk(
    environment: Mapping[str, str], backend: str = "gloo", ranks: int = 2, port: int | None = None, limit: float = 60.0
) -> Finding:
    """Return whether ranks of this machine can talk to each other.

    Args:
        environment: of the ranks.
        backend: of torch.distributed.
        ranks: how many.
        port: where they meet; a free one where it isn't given.
        limit: seconds.
    """
    name = f"ranks over {backend}"
    try:
        port = free_port() if port is None else port
    except OSError as error:
        said = f"no port can be opened on 127.0.0.1 ({error.strerror or error}), and ranks meet at one"
        return Finding(name, State.UNKNOWN, said, "allow this process to listen on the loopback interface")
    commands = [["talk", str(rank), str(ranks), str(port), backend, str(limit / 2)] for rank in range(ranks)]
    answers = ask(commands, environment, limit)
    right = float(sum(range(1, ranks + 1)))
    if all(answer.facts and answer.facts[-1]["total"] == right for answer in answers):
        return Finding(name, State.FINE, f"{ranks} ranks talk over {backend}")
    why = next((a.last for a in answers if a.last), f"nothing was heard of them within {limit:g} s")
    return Finding(name, State.UNKNOWN, f"{ranks} ranks can't talk over {backend}: {why}", _of_talk(why, environment))


def _of_talk(why: str, environment: Mapping[str, str]) -> str:
    if "EADDRINUSE" in why or "in use" in why:
        return "another process listens on that port: choose another one (--master_port of the deepspeed launcher)"
    named = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if environment.get(name)]
    if named:
        return f"{named[0]} is {environment[named[0]]}: name an interface of `ip link`, or unset it"
    return "check that 127.0.0.1 and this machine's own name can be reached (/etc/hosts, firewalls)"


def built(names: Sequence[str], environment: Mapping[str, str], limit: float = 1800.0) -> Iterator[Finding]:
    """Compile operators, each in the folder in which DeepSpeed will look for it; yield how it went.

    Args:
        names: of DeepSpeed's builders, such as CPUAdamBuilder.
        environment: says which folder.
        limit: seconds, compiling aside: how long another process's lock is waited for.
    """
    (answer,) = ask([["build", *names]], environment, limit)
    said = {fact["operator"]: fact for fact in answer.facts}
    for name in names:
        if name not in said:
            why = answer.last or "the process ended without a word"
            yield Finding(f"build of {name}", State.BITES, f"{name} was not built: {why}")
        elif said[name]["built"]:
            yield Finding(f"build of {name}", State.FINE, f"{name} is built")
        else:
            yield Finding(f"build of {name}", State.BITES, f"{name} was not built: {said[name]['why']}")
