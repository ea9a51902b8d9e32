"""Run the matrix and tests with the DeepSpeed that is installed, and write down what came of them.

python -m tools.versions.measure --matrix quick                  # the quick subset; nothing after --matrix: all
python -m tools.versions.measure --matrix precision offload      # some groups or rows
python -m tools.versions.measure --tests tests/engine tests/distributed
python -m tools.versions.measure --take ds_parity_out/matrix/matrix.json   # what `ds-parity verify --matrix` left

Results of one release stand in tools/versions/results/RELEASE.json. A run replaces the cells and files that it ran and
leaves the others, so that a release may be measured in parts. docs/versions.md is made of them (`make pages`).
"""

import argparse
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
if not __package__:
    # Started as a file: Python looks for modules beside it, and the modules below are found from the repository.
    sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "tools" / "versions" / "results"
# What is said of a cell that raises where bare DeepSpeed does, and by the same error; and how findings name errors.
RAISES = "raises"
_OURS = re.compile(r"(?:ds_parity|\S+/probe): (\w+: .{0,40})")
_BARE = re.compile(r"\(bare, [\w-]+: (\w+: .{0,40})")
# Of a finding that is not simply right, a reader needs the beginning.
_WHY = 240


def load(folder: Path, release: str) -> dict[str, Any]:
    """Return what is known of a release; nothing where it was never run."""
    path = folder / f"{release}.json"
    empty: dict[str, Any] = {"deepspeed": release, "ran_with": {}, "cells": [], "tests": {}}
    return json.loads(path.read_text()) if path.exists() else empty


def store(folder: Path, known: dict[str, Any]) -> Path:
    """Write what is known of a release, and return where."""
    path = folder / f"{known['deepspeed']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return path


def with_cells(known: dict[str, Any], matrix: dict[str, Any]) -> dict[str, Any]:
    """Return what is known with the cells of a matrix in the place of those before.

    Args:
        known: of a release.
        matrix: as `ds-parity verify --matrix --json` prints it.
    """
    at = {_place(cell) for cell in matrix["cells"]}
    # What lacks something here, or a judge, says nothing of the release, and what was said before was of other code.
    new = [_cell(cell) for cell in matrix["cells"] if cell["status"] != "not run"]
    kept = [cell for cell in known["cells"] if _place(cell) not in at]
    ran_with = {name: matrix["facts"][name] for name in ("torch", "accelerator") if name in matrix["facts"]}
    before = known["ran_with"].get("accelerator", "")
    if before and before.startswith(ran_with.get("accelerator", before)):
        # Rows that are kept may have needed more of it: fp16 where the processor says no.
        ran_with["accelerator"] = before
    return {**known, "cells": sorted(kept + new, key=_place), "ran_with": ran_with}


def _place(cell: dict[str, Any]) -> tuple[str, str, int]:
    return cell["group"], cell["name"], cell["stage"]


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    worst = next((f for f in cell["findings"] if f["status"] == cell["status"]), None)
    why = {} if cell["status"] == "right" or worst is None else {"why": f"{worst['check']}: {worst['detail']}"[:_WHY]}
    kept = {name: cell[name] for name in ("group", "name", "stage", "status")} | why
    return kept | ({"status": RAISES} if _raises_as_bare(cell) else {})


def _raises_as_bare(cell: dict[str, Any]) -> bool:
    """Return whether nothing is wrong with a cell but that it raises what bare DeepSpeed raises in it, too."""
    wrong = [finding for finding in cell["findings"] if finding["status"] in ("failed", "differs")]
    ours = [_OURS.match(one["detail"]) if one["status"] == "failed" else None for one in wrong]
    bare = {_plain(said) for one in cell["findings"] for said in _BARE.findall(one["detail"])}
    return bool(wrong) and all(raised is not None and _plain(raised.group(1)) in bare for raised in ours)


def _plain(said: str) -> str:
    # Numbers in a message (of a parameter, of a module) are other ones in another process.
    return re.sub(r"\d+", "", said)[:40].rstrip(" )")


def with_tests(known: dict[str, Any], report: Path) -> dict[str, Any]:
    """Return what is known with the counts of a JUnit report, file by file.

    Args:
        known: of a release.
        report: as `pytest --junitxml` writes it.
    """
    counted: dict[str, Counter[str]] = {}
    for case in Xml.parse(report).iter("testcase"):
        # A module that is skipped as a whole has no class, and is the name.
        place = case.get("classname") or case.get("name", "")
        file = "/".join(part for part in place.split(".") if not part[:1].isupper()) + ".py"
        counted.setdefault(file, Counter())[_outcome(case)] += 1
    return {**known, "tests": {**known["tests"], **{file: dict(counts) for file, counts in counted.items()}}}


def _outcome(case: Xml.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def run_matrix(subsets: Iterable[str | None], folder: Path) -> dict[str, Any]:
    """Run cells of the matrix and return them as `verify --matrix --json` prints them."""
    # Here, so that results can be taken and shown where nothing can be run.
    from ds_parity.parity.matrix import whole_matrix

    wanted = {cell.name: cell for subset in subsets for cell in whole_matrix.chosen(subset)}
    return whole_matrix.plain(
        whole_matrix.verify(tuple(wanted.values()), folder, lambda done, at: print(f"{done:4d} {at}", flush=True))
    )


def run_tests(paths: list[str], report: Path) -> int:
    """Run tests, leave a JUnit report, and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not hf", *paths, f"--junitxml={report}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Run, write down, and say whether all that was run is as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--matrix", nargs="*", help="'quick', groups, or parts of rows' names; none: all")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="matrix.json of runs that were made before")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    good = True
    for path in given.take:
        matrix = json.loads(path.read_text())
        print(store(given.into, with_cells(load(given.into, matrix["facts"]["deepspeed"]), matrix)))
    release = version("deepspeed")
    with TemporaryDirectory() as folder:
        if given.matrix is not None:
            matrix = run_matrix(given.matrix or [None], Path(folder))
            store(given.into, with_cells(load(given.into, release), matrix))
            print(f"deepspeed {release}: {matrix['summary']}")
            good = bool(matrix["equal"])
        if given.tests:
            report = Path(folder) / "junit.xml"
            good = run_tests(given.tests, report) == 0 and good
            store(given.into, with_tests(load(given.into, release), report))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
