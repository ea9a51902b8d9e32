"""The tables of docs/versions.md: what the table in code says, beside what was really run."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from ds_parity.config.features import COALESCED, FEATURES, FETCHED, LEFT_OUT, PIPELINES, SPARSE, Feature
from ds_parity.config.releases import Release
from ds_parity.config.versions import ENTRIES, MEASURED, Entry, Verdict, entries_of, verdict
from ds_parity.parity.matrix.cells import cells
from tools.versions.measure import RAISES, RESULTS

NOT_RUN = "not run"
_GOOD = ("right", "corrected", "refused")
_NOT_WRONG = (*_GOOD, RAISES)
# Rows of the matrix that show what no configuration asks for, and tests that do.
_ROWS = {LEFT_OUT.name: ("unused parameters", "frozen parameters")}
_TESTS = {
    LEFT_OUT.name: ("tests/distributed/test_changing_parameters.py",),
    COALESCED.name: ("tests/distributed/test_callers_coalesced.py",),
    PIPELINES.name: ("tests/distributed/test_pipelines.py",),
    SPARSE.name: ("tests/distributed/test_sparse_gradients.py",),
    FETCHED.name: ("tests/distributed/test_fetched_weights.py",),
}

Results = Mapping[str, Mapping[str, Any]]
Place = tuple[str, str, int]


def results(folder: Path = RESULTS) -> Results:
    """Return what was run, by release."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def features(ran: Results) -> str:
    """Return the table of features and releases."""
    known = {entry: number for number, entry in enumerate(ENTRIES, start=1)}
    places = places_of_features()
    lines = [f"| | {' | '.join(map(str, MEASURED))} |", "|---" * (1 + len(MEASURED)) + "|"]
    for feature in FEATURES:
        shown = []
        for version in MEASURED:
            # In one pair of brackets: two in a row are a link in Markdown.
            noted = ", ".join(str(known[entry]) for entry in entries_of(feature, version))
            numbers = f" [{noted}]" if noted else ""
            shown.append(_shown(feature, version, ran.get(str(version), {}), places[feature.name]) + numbers)
        lines.append(f"| {feature.name} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(_note(number, entry) for entry, number in known.items())]) + "\n"


def _note(number: int, entry: Entry) -> str:
    since = f"{entry.first} to" if entry.first else "up to"
    until = f"{since} the release before {entry.right_from}" if entry.right_from else f"{since} the newest release"
    until = "in every release" if not (entry.first or entry.right_from) else until
    out = f"; the way out: {entry.way_out}" if entry.way_out else ""
    return _item(f"{number}. ", f"{entry.verdict}, {until}: {entry.what} ({entry.evidence}){out}.")


def _item(mark: str, text: str) -> str:
    indent = " " * len(mark)
    return fill(
        text, 120, initial_indent=mark, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _shown(feature: Feature, version: Release, ran: Mapping[str, Any], places: set[Place]) -> str:
    said = verdict(feature, version)
    if said is Verdict.REFUSED:
        return str(said)
    cells_run = (cell for cell in ran.get("cells", []) if (cell["group"], cell["name"], cell["stage"]) in places)
    statuses = Counter(cell["status"] for cell in cells_run)
    tests_run = Counter[str]()
    for file in _TESTS.get(feature.name, ()):
        tests_run.update(ran.get("tests", {}).get(file, {}))
    return _counted(statuses, tests_run, len(places), corrected=said is Verdict.CORRECTED)


def _counted(statuses: Counter[str], tests_run: Counter[str], rows: int, *, corrected: bool) -> str:
    done, passed = sum(statuses.values()), tests_run["passed"] + tests_run["failed"]
    if not done and not passed:
        return NOT_RUN
    raised = statuses[RAISES]
    wrong = sum(count for status, count in statuses.items() if status not in _NOT_WRONG) + tests_run["failed"]
    amounts = ((done, f"{done} of {rows} rows"), (raised, f"{raised} raise"), (passed, f"{passed} tests"))
    amount = ", ".join(said for number, said in amounts if number)
    if wrong:
        return f"**{wrong} wrong** ({amount})"
    if corrected or statuses["corrected"]:
        return f"corrected ({amount})"
    # Where every row that was run refuses what no release can do.
    return f"{'refused' if statuses['refused'] == done > 0 else 'right'} ({amount})"


def places_of_features() -> dict[str, set[Place]]:
    """Return the rows of the matrix, each with its ZeRO stage, that show a feature."""
    every = cells()
    return {
        feature.name: {
            (cell.variant.group, cell.variant.name, cell.stage)
            for cell in every
            if feature.asked_for(cell.ragged.config)
            or feature.name in cell.calls
            or cell.variant.name in _ROWS.get(feature.name, ())
        }
        for feature in FEATURES
    }


def matrix(ran: Results) -> str:
    """Return how much of the matrix was run on each release, and what it came to."""
    total = len(cells())
    lines = ["| DeepSpeed | torch | cells run | right | corrected | refused | raise | wrong |", "|---" * 8 + "|"]
    for version in map(str, MEASURED):
        known = ran.get(version, {})
        counts = Counter(cell["status"] for cell in known.get("cells", []))
        wrong = sum(count for status, count in counts.items() if status not in _NOT_WRONG)
        numbers = " | ".join(str(counts[status]) for status in _NOT_WRONG)
        torch = known.get("ran_with", {}).get("torch", "-")
        lines.append(f"| {version} | {torch} | {sum(counts.values())} of {total} | {numbers} | {wrong} |")
    return "\n".join([*lines, "", *_wrong(ran)]) + "\n"


def _wrong(ran: Results) -> Iterable[str]:
    for version, known in ran.items():
        for cell in known.get("cells", []):
            if cell["status"] not in _GOOD:
                where = f"{cell['group']}: {cell['name']}, ZeRO {cell['stage']}"
                yield _item("- ", f"{version}, {where}: {cell['status']}. {cell.get('why', '')}")


def tests(ran: Results) -> str:
    """Return what tests came to, file by file: those that ran on more than nothing."""
    files = sorted({file for known in ran.values() for file in known.get("tests", {})})
    if not files:
        return "No tests have been run on any release yet.\n"
    columns = [str(version) for version in MEASURED]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for file in files:
        shown = (_passed(ran.get(version, {}).get("tests", {}).get(file)) for version in columns)
        lines.append(f"| `{file.removeprefix('tests/')}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _passed(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return NOT_RUN
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts.get(name))
