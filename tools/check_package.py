"""Build the wheel and the source archive, and check both as a user will meet them.

    make package

builds from a copy of the files that git knows, so that nothing of an earlier build comes along; looks into both
archives; installs the wheel with what it requires into an empty environment; and runs its commands in an empty folder.
The environment takes about a minute: with the versions of constraints.txt a CPU build of torch that lies on the machine
is used, and no CUDA packages come.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Beside the package itself; whoever builds from the source archive needs no more.
SOURCES = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg")


def tracked() -> set[str]:
    """Return the files that git knows or would add, as paths from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).exists()}


def named(setup: str) -> set[str]:
    """Return the files whose text a setup.cfg takes in, `file: PATH`: a build needs them."""
    return {path.strip() for line in re.findall(r"file:(.*)", setup) for path in line.split(",")}


def faults(wheel: Iterable[str], source: Iterable[str], known: Iterable[str], needed: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with the contents of the archives, a sentence each.

    Args:
        wheel: paths in the wheel.
        source: paths in the source archive, below its one folder.
        known: files of the repository.
        needed: files beside the package and `SOURCES` that a build needs.
    """
    package = {path for path in known if path.startswith("ds_parity/")}
    in_wheel = {path for path in wheel if ".dist-info/" not in path}
    in_source = {path for path in source if ".egg-info/" not in path} - {"PKG-INFO"}
    wanted = package | {*SOURCES, *needed}
    return [
        *(f"the wheel lacks {path}" for path in sorted(package - in_wheel)),
        *(f"the wheel has {path}, which is no part of the package" for path in sorted(in_wheel - package)),
        *(f"the source archive lacks {path}" for path in sorted(wanted - in_source)),
        *(f"the source archive has {path}, which no build needs" for path in sorted(in_source - wanted)),
    ]


def built(folder: Path) -> tuple[Path, Path]:
    """Build both archives in a folder; returns the wheel and the source archive."""
    for path in tracked():
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / "source" / path)
    _run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source")
    (wheel,), (source,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    return wheel, source


def contents(wheel: Path, source: Path) -> tuple[list[str], list[str]]:
    """Return the files of both archives."""
    with zipfile.ZipFile(wheel) as one, tarfile.open(source) as other:
        files = [member.name.partition("/")[2] for member in other.getmembers() if member.isfile()]
        return [name for name in one.namelist() if not name.endswith("/")], files


def tried(wheel: Path, folder: Path) -> None:
    """Install the wheel into an empty environment, and run its commands in an empty folder."""
    venv.create(folder / "empty", with_pip=True)
    bin_ = folder / "empty" / "bin"
    _run(bin_ / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    _run(bin_ / "python", "-m", "pip", "check")
    place = folder / "place"
    place.mkdir()
    command = bin_ / "ds-parity"
    said = _run(command, "--version", cwd=place)
    if _run(bin_ / "python", "-m", "ds_parity", "--version", cwd=place) != said:
        sys.exit("`python -m ds_parity` is not the command `ds-parity`")
    _run(command, "init", cwd=place)
    rewritten = json.loads(_run(command, "rewrite", "ds_config.json", "--ranks", "2", cwd=place))
    if rewritten["gradient_accumulation_steps"] != 6:
        sys.exit(f"what init wrote was rewritten to {rewritten}")
    _run(command, "plan", "--json", cwd=place)
    _run(command, "--show-completion", "bash", cwd=place)
    _run(bin_ / "python", "-m", "py_compile", "train.py", cwd=place)
    print(f"installed and run: {said.strip()}")


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that must succeed, without what points into this repository; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    ran = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if ran.returncode:
        sys.exit(f"{' '.join(words)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def main() -> None:
    """Build, look inside, install, run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, source = built(folder)
        needed = named((ROOT / "setup.cfg").read_text())
        if wrong := faults(*contents(wheel, source), tracked(), needed):
            sys.exit("\n".join(wrong))
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {source.name}: {source.stat().st_size:,} bytes")
        tried(wheel, folder)


if __name__ == "__main__":
    main()
