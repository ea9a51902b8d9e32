"""What the machine offers: compilers, the folder of compiled operators, locks in it, shared memory."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from ds_parity.parity.doctor.asking import end
from ds_parity.parity.doctor.findings import Finding, State
from ds_parity.parity.running.compiling import extensions_folder, locks
from ds_parity.parity.running.holders import holders

SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed's CPU collectives take this much for each rank (ops/csrc/cpu/comm/shm.cpp, 0.19.8).
_OF_A_RANK = 66_000_000
_SECONDS = 10  # for a compiler to say its version
_INSTALL = "install g++ (apt install g++, or conda install -c conda-forge gxx), or name a compiler in CXX"


def compilers(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether there is what torch compiles DeepSpeed's operators with."""
    named = environment.get("CXX", "c++")
    first, *rest = named.split() or ["c++"]
    found = shutil.which(first, path=environment.get("PATH"))
    if found is None:
        said = f"there is no C++ compiler ({named} is not on PATH), and DeepSpeed compiles operators when they are used"
        yield Finding("compiler", State.BITES, said, _INSTALL)
    elif (why := _does_not_run([found, *rest])) is not None:
        said = f"the C++ compiler {named} does not run ({why}), and DeepSpeed compiles operators when they are used"
        yield Finding("compiler", State.BITES, said, _INSTALL)
    else:
        yield Finding("compiler", State.FINE, f"C++ compiler: {found}")
    ninja = shutil.which("ninja", path=environment.get("PATH"))
    if ninja is None:
        said = "ninja is not on PATH, and torch compiles DeepSpeed's operators with it"
        yield Finding("ninja", State.BITES, said, "pip install ninja, and put the environment's bin folder on PATH")
    else:
        yield Finding("ninja", State.FINE, f"ninja: {ninja}")


def _does_not_run(command: list[str]) -> str | None:
    """Return why a compiler can't say its version, which torch asks it for (torch/utils/cpp_extension.py)."""
    # The user's own environment: a compiler may need more of it than PATH. In a session of its own, so that what it
    # starts ends with it, and not into a pipe, which a server of its may keep open.
    with _nowhere_or_a_file() as said:
        try:
            process = subprocess.Popen(
                [*command, "-dumpversion"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return str(error)
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            end(process)
            return f"it did not end within {_SECONDS} s"
        said.seek(0)
        lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return None if code == 0 else f"it ended with {code}: {lines[-1][:200] if lines else 'it said nothing'}"


def _nowhere_or_a_file() -> IO[bytes]:
    """Open a temporary file, or, where none can be made, as on a full disk, what reads as empty."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return Path(os.devnull).open("r+b")


def cache(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield how the folder of compiled operators stands."""
    folder, _ = extensions_folder(environment)
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        # By writing: permissions say little on a read-only file system, and nothing to root.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        said = f"compiled operators go into {folder}, which can't be written ({error.strerror or error})"
        way_out = "set TORCH_EXTENSIONS_DIR to a folder of your own, on every rank"
        yield Finding("cache", State.BITES, said, way_out)
    else:
        yield Finding("cache", State.FINE, f"compiled operators: {folder}")
    yield from _of_others(environment)


def _of_others(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the compiled operators that belong to another environment's torch, which then compiles them anew."""
    spec = find_spec("torch")
    own = None if spec is None or spec.origin is None else Path(spec.origin).parent.resolve()
    folder, pattern = extensions_folder(environment)
    others: dict[Path, list[str]] = {}
    for path in sorted(folder.glob(pattern.replace("lock", "build.ninja"))):
        with suppress(OSError):
            for found in set(re.findall(r"-isystem (\S+/torch)/include(?=\s)", path.read_text(errors="replace"))):
                if own is not None and Path(found).resolve() != own:
                    others.setdefault(Path(found), []).append(path.parent.name)
    for torch, names in others.items():
        said = f"{', '.join(names)} in {folder} {_was(names)} compiled with another environment's torch, {torch}"
        way_out = (
            "give each environment a TORCH_EXTENSIONS_DIR of its own: they compile over each other's operators, and "
            "one that runs meanwhile may load the other's"
        )
        yield Finding("shared cache", State.BITES, said, way_out)


def _was(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"


def held(environment: Mapping[str, str], now: float | None = None) -> Iterator[Finding]:
    """Yield each lock that lies beside an operator: who wrote it, since when, and whether its process still runs."""
    now = time.time() if now is None else now
    for lock in locks(environment):
        name = f"lock of {lock.extension}"
        with suppress(OSError):
            status = lock.path.stat()
            since = f"{lock.path}, written by {_owner(status.st_uid)} {_ago(now - status.st_mtime)}"
            holder = _holder(lock.path)
            if holder is not None:
                said = f"{since}, is held by process {holder}, which compiles: other processes wait for it"
                yield Finding(name, State.PERHAPS, said, "let it finish: it takes about 90 s")
            elif _visible(status.st_uid):
                said = f"{since}, is held by no process of this machine: its compile was killed, and all ranks wait"
                yield Finding(name, State.BITES, said, f"delete it, unless another host compiles: rm {lock.path}")
            else:
                said = f"{since}, belongs to another user, whose processes can't be seen from here"
                yield Finding(name, State.BITES, said, "set TORCH_EXTENSIONS_DIR to a folder of your own")


def _holder(path: Path) -> str | None:
    """Return the process that has the lock open, as torch does while it compiles (torch/utils/file_baton.py)."""
    for process in holders(path):
        with suppress(OSError):  # it has just ended
            command = Path("/proc", str(process), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"{process} ({command.strip()[:80]})"
    return None


def _visible(uid: int) -> bool:
    return sys.platform == "linux" and os.geteuid() in (0, uid)


def _owner(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return "just now"


def shared_memory(ranks: int, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Yield whether ranks find the shared memory that DeepSpeed's CPU collectives need.

    Args:
        ranks: on this machine.
        folder: where shared memory is mounted.
    """
    if not folder.exists():
        said = f"there is no {folder}: shared memory is not mounted"
        yield Finding("shared memory", State.UNKNOWN, said, "mount a tmpfs there")
        return
    free, needed = shutil.disk_usage(folder).free, ranks * _OF_A_RANK
    left = [path for path in folder.glob("deepspeed_allreduce_buffer_*") if path.exists()]
    told = f"{free / 1e6:,.0f} MB of {folder} are free"
    way_out = "give the container more of it (docker run --shm-size=2g, or --ipc=host)"
    if left:
        size = sum(path.stat().st_size for path in left) / 1e6
        told += f"; {len(left)} buffers of DeepSpeed's take {size:,.0f} MB, left behind by ranks that have ended or run"
        way_out = f"delete {folder}/deepspeed_allreduce_buffer_* where no rank runs, or {way_out}"
    if free < needed:
        said = f"{told}; {ranks} ranks on a CPU need {needed / 1e6:,.0f} MB"
        yield Finding("shared memory", State.BITES, said, way_out)
    else:
        yield Finding("shared memory", State.FINE, told)
