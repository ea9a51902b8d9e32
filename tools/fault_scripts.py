"""The scripts of tools/deepspeed_faults: their names, and whether what was kept was measured with them as they are."""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from ds_parity.parity.doctor.measured import PATH

SCRIPTS = Path(__file__).parent / "deepspeed_faults"
_COMMON = "_places"


def names() -> list[str]:
    """Return the names of all scripts, first that of the plainest loop, on which most depends."""
    return sorted((path.stem for path in SCRIPTS.glob("[!_]*.py")), key=lambda name: (name != "several_passes", name))


def digest(name: str, folder: Path = SCRIPTS) -> str:
    """Return a digest of what a script runs: its lines and those of the files here that it imports, which begin with _.

    Docstrings and empty lines are left out.

    Args:
        name: of the script.
        folder: of the scripts.
    """
    text = (folder / f"{name}.py").read_text()
    others = sorted(stem for stem in _imported(text) if stem and stem != _COMMON and (folder / f"{stem}.py").is_file())
    texts = [_code((folder / f"{stem}.py").read_text()) for stem in (name, _COMMON, *others)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


# Each version asks for the same files.
@cache
def _imported(text: str) -> set[str | None]:
    return {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}


@cache
def _code(text: str) -> str:
    lines: list[str] = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        # Docstrings and notes below a name: strings that are a statement of their own.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def kept() -> dict[str, Any]:
    """Return what was kept so far."""
    empty: dict[str, Any] = {"torch": {}, "digests": {}, "versions": {}}
    return empty | json.loads(PATH.read_text()) if PATH.exists() else empty


def missing(version: str) -> list[str]:
    """Return the scripts of which nothing is kept of a version, or only what another state of the script found."""
    everything = kept()
    found, digests = (everything[part].get(version, {}) for part in ("versions", "digests"))
    return [name for name in names() if name not in found or digests.get(name) != digest(name)]
