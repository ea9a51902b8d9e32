"""Measure which of DeepSpeed's faults are there in which version, and keep it where the documentation and doctor look.

python -m tools.fault_table                          the DeepSpeed that is installed
python -m tools.fault_table versions/0.18.4 ...      each in a folder of its own, as `pip install --target` leaves it

    pip install --no-deps --target versions/0.18.4 deepspeed==0.18.4

Every script of tools/deepspeed_faults runs on two ranks, several in one start of them. A place whose ranks end or hang
is told so, and the ranks are started again with the script behind it. `--operators` names a folder in which each
version compiles its operators apart: one version's must never be loaded by another.
"""

import argparse
import fcntl
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version as torch_version
from pathlib import Path
from typing import Any

from ds_parity.errors import HarnessError
from ds_parity.parity.doctor.measured import numbers
from ds_parity.parity.running.launch import Call, Job, run_job
from tools import fault_scripts
from tools.fault_scripts import SCRIPTS, digest, kept, missing, names

ROOT = Path(__file__).parent.parent
# Seconds for all scripts of a start, and for one of them.
LIMITS: dict[str, float] = {"timeout": 1500.0, "patience": 60.0}
NOT_TOLD = "error: the ranks ended: "


def run_script(name: str, told: str) -> dict[str, str]:
    """Run one script on this rank, and write every place down before it is measured and after it.

    Args:
        name: of the script.
        told: the file of the first rank; the others have one each beside it.
    """
    sys.path.insert(0, str(SCRIPTS))
    import torch.distributed as dist

    places = importlib.import_module("_places")
    rank = dist.get_rank()

    def hear(place: str, outcome: str | None) -> None:
        with (Path(told) if rank == 0 else Path(f"{told}.{rank}")).open("a") as out:
            out.write(json.dumps([name, place, outcome]) + "\n")

    places.heard[:] = [hear]
    with suppress(places.NotThere):
        places.forget_autocast()  # where a script was stopped by an error it is still on
    places.allow_fp16()
    module = importlib.import_module(name)
    result: dict[str, str] = module.main()
    return result


def measure(wanted: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each script and what came out of its places, those of a start of ranks together.

    Args:
        wanted: names of scripts.
        folder: for logs.
        environment: variables that choose the version.
    """
    told, left = folder / "told.jsonl", list(wanted)
    while left:
        calls = [Call(name, "tools.fault_table:run_script", {"name": name, "told": str(told)}) for name in left]
        job = Job(tuple(calls), folder / "ranks", 2, import_from=(str(ROOT),), environment=environment, **LIMITS)
        behind: list[str] = []
        try:
            run_job(job, lambda done, title: None)
        except HarnessError as error:
            behind = _behind(told, left, str(error))
        finally:
            # Also where somebody ends this program: a script is complete where the one behind it has begun.
            now = _read(told)
            begun = [name for name in left if name in now]
            done = [name for name in left if name not in behind] if not sys.exc_info()[0] else begun[:-1]
            found = [(name, {place: str(outcome) for place, outcome in now.get(name, {}).items()}) for name in done]
            yield from found
        left = behind


def _behind(told: Path, left: list[str], why: str) -> list[str]:
    """Note the place that ended the ranks; return the scripts behind that one."""
    now = _read(told)
    begun = [name for name in left if name in now] or left[:1]
    name = begun[-1]
    place = next((place for place, outcome in now.get(name, {}).items() if outcome is None), None)
    others = [_read(path).get(name, {}).get(place or "") for path in sorted(told.parent.glob(f"{told.name}.*"))]
    said = next((outcome for outcome in others if outcome and outcome.startswith("error")), None)
    outcome = f"{said} (on one rank, for which the others wait)" if said else NOT_TOLD + _short(why)
    with told.open("a") as out:
        out.write(json.dumps([name, place or "all", outcome]) + "\n")
    # Its other places are not tried: each would take as long to end.
    return left[left.index(name) + 1 :]


def _short(why: str) -> str:
    # Paths of this machine say nothing to a reader.
    return re.sub(r"\(log: .*?\)|; look at \S+.*|the log \S+ says: ", "", why).strip()[:200]


def _read(told: Path) -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for line in told.read_text().splitlines() if told.exists() else ():
        name, place, outcome = json.loads(line)
        found.setdefault(name, {})[place] = outcome
    return found


def environment_of(folder: Path | None, operators: Path | None) -> tuple[str, dict[str, str]]:
    """Return the version that ranks will import, and the variables that make them do so.

    Args:
        folder: of `pip install --target`; None: the installed one.
        operators: folder of the folders of compiled operators; None: as the environment says.

    Raises:
        SystemExit: it can't be imported.
    """
    environment: dict[str, str] = {}
    if folder is not None:
        before = os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder.resolve()), before]))
    code = "import deepspeed, torch; print('\\n' + deepspeed.__version__, deepspeed.__file__, torch.__version__)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, **environment}, timeout=300, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{folder or 'the installed DeepSpeed'} can't be imported: {ran.stderr.strip()[-500:]}")
    version, file, _ = ran.stdout.strip().splitlines()[-1].split()
    if folder is not None and not Path(file).is_relative_to(folder.resolve()):
        raise SystemExit(f"{folder}: Python imports {file}, not what lies there")
    if operators is not None:
        environment["TORCH_EXTENSIONS_DIR"] = str((operators / version).resolve())
    return version, environment


def keep(version: str, torch: str, found: dict[str, dict[str, str]], digests: dict[str, str]) -> None:
    """Put what was found of a version beside what was kept of it and of others, versions and scripts in order.

    Args:
        version: of DeepSpeed.
        torch: its version.
        found: by script and place.
        digests: of the scripts as they were before they were run.
    """
    with _alone():
        _put(version, torch, found, digests)


@contextmanager
def _alone() -> Iterator[None]:
    # Two versions may be measured beside each other, and each reads what the other one writes.
    folder = os.open(fault_scripts.PATH.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _put(version: str, torch: str, found: dict[str, dict[str, str]], digests: dict[str, str]) -> None:
    everything = kept()
    scripts = {**everything["versions"].get(version, {}), **found}
    versions = {**everything["versions"], version: {name: scripts[name] for name in sorted(scripts)}}
    everything["versions"] = {name: versions[name] for name in sorted(versions, key=numbers)}
    everything["torch"] = {name: {**everything["torch"], version: torch}[name] for name in everything["versions"]}
    known = {**everything["digests"], version: {**everything["digests"].get(version, {}), **digests}}
    everything["digests"] = {
        one: {name: known.get(one, {}).get(name) for name in scripts} for one, scripts in everything["versions"].items()
    }
    fault_scripts.PATH.write_text(_lines(everything))


def _lines(everything: dict[str, Any]) -> str:
    """Return the file's text, one line for each script, which is what a diff should show."""
    parts = [f'"{part}": {{\n{_of_versions(everything[part])}\n}}' for part in ("digests", "versions")]
    return ",\n".join([f'{{"torch": {json.dumps(everything["torch"])}', *parts]) + "}\n"


def _of_versions(versions: dict[str, dict[str, Any]]) -> str:
    told = []
    for version, scripts in versions.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in scripts.items())
        told.append(f" {json.dumps(version)}: {{\n{rows}\n }}")
    return ",\n".join(told)


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, keep, say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="one for each version; none: the installed one")
    parser.add_argument("--only", action="append", choices=names(), help="a script; may be repeated")
    parser.add_argument("--missing", action="store_true", help="only scripts not run yet, or changed since they were")
    parser.add_argument("--operators", type=Path, help="folder of the folders of compiled operators")
    # Whoever ends this program with a signal keeps what was found, and leaves no rank behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    given = parser.parse_args(None if arguments is None else list(arguments))
    for folder in given.folders or [None]:
        version, environment = environment_of(folder, given.operators)
        wanted = given.only or names()
        if given.missing:
            wanted = [name for name in wanted if name in missing(version)]
        digests = {name: digest(name) for name in wanted}
        with tempfile.TemporaryDirectory() as scratch:
            for name, places in measure(wanted, Path(scratch), environment):
                keep(version, torch_version("torch"), {name: places}, {name: digests[name]})
                print(f"{version} {name}: {places}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
