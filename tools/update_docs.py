"""Put tables that a program makes into README.md and docs/, between the marks of each.

python tools/update_docs.py pages                                        tables that need no run
python tools/update_docs.py matrix ds_parity_out/matrix/matrix.md        what `ds-parity verify --matrix` left
python tools/update_docs.py figures ds_parity_out/controls               what `ds-parity controls` left
python tools/update_docs.py controls ds_parity_out/controls_found        what `ds-parity controls --json` printed
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
if not __package__:
    # Started as a file: Python looks for modules in tools/, and the modules below are found from the repository.
    sys.path.insert(0, str(ROOT))

from ds_parity.errors import DsParityError  # noqa: E402  the path must be set before
from tools import fault_pages, page_tables, results_tables  # noqa: E402  the same
from tools.migrations import tables as migrations  # noqa: E402  the same
from tools.versions import page as versions_page  # noqa: E402  the same

README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Tables by the name in their marks: the page, and what makes it. No run is needed for these.
PAGES: dict[str, tuple[Path, Callable[[], str]]] = {
    "keys": (DOCS / "configuration.md", page_tables.keys),
    "symptoms": (DOCS / "troubleshooting.md", page_tables.symptoms),
    "faults": (DOCS / "deepspeed_faults.md", page_tables.faults),
    "fault-versions": (DOCS / "deepspeed_faults.md", page_tables.fault_versions),
    "fault-runs": (DOCS / "deepspeed_faults.md", fault_pages.runs),
    "fault-counts": (DOCS / "doctor.md", fault_pages.short),
    "quotas": (DOCS / "from_pipelinerl.md", page_tables.quotas),
    "releases": (DOCS / "versions.md", lambda: versions_page.features(versions_page.results())),
    "releases-matrix": (DOCS / "versions.md", lambda: versions_page.matrix(versions_page.results())),
    "releases-tests": (DOCS / "versions.md", lambda: versions_page.tests(versions_page.results())),
    "time": (DOCS / "performance.md", results_tables.time_of_a_window),
    "callers": (DOCS / "performance.md", results_tables.callers),
    "late": (DOCS / "performance.md", results_tables.late),
    "limit": (DOCS / "performance.md", results_tables.limit),
    "costs": (DOCS / "performance.md", results_tables.costs),
    "quota": (DOCS / "performance.md", results_tables.quota),
    "waiting": (DOCS / "performance.md", results_tables.waiting),
    "recipe": (DOCS / "performance.md", results_tables.recipe),
    "exchange": (DOCS / "performance.md", results_tables.exchange),
    **{name: (DOCS / "migrations" / f"{page}.md", make) for name, (page, make) in migrations.TABLES.items()},
}
# Faults of the README's table; docs/how_it_works.md has them all.
IN_README = ("mean-of-micro-batches", "dp-mean-left-in", "scheduler-per-pass")


def made_from_runs(part: str, source: Path) -> Iterator[tuple[Path, str]]:
    """Yield each page that shows a part, and its table, from what the harness left at `source`.

    Raises:
        TraceError: a trace is not there, or can't be read.
        DsParityError: ds_parity's own figures are not the right ones.
    """
    if part == "matrix":
        text = source.read_text()
        yield DOCS / "matrix.md", text
        yield README, text.split(" (")[0] + ".\n"
        return
    if part == "controls":
        yield DOCS / "harness.md", page_tables.controls(source)
        return
    yield README, page_tables.figures(source, IN_README)
    yield DOCS / "how_it_works.md", page_tables.figures(source, tuple(page_tables.BY_HAND))


def marks(part: str) -> tuple[str, str]:
    """Return the comments between which a part stands."""
    command = "pages" if part in PAGES else part
    return f"<!-- {part}: made by `make {command}` -->", f"<!-- {part}: end -->"


def shown(page: Path, part: str) -> str:
    """Return what stands between the marks of a part.

    Raises:
        DsParityError: the marks don't stand there once each.
    """
    begin, end = marks(part)
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise DsParityError(f"{page}: the marks {begin} and {end} must stand there once each")
    return text.split(begin)[1].split(end)[0].removeprefix("\n")


def put(page: Path, part: str, text: str) -> None:
    """Replace what stands between the marks of a part.

    Raises:
        DsParityError: the marks don't stand there once each.
    """
    begin, end = marks(part)
    before = f"{begin}\n{shown(page, part)}{end}"
    page.write_text(page.read_text().replace(before, f"{begin}\n{text}{end}"))
    print(f"{page.relative_to(ROOT)}: {len(text.splitlines())} lines between the marks of {part}")


def main() -> int:
    """Parse, replace, say what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("pages", "matrix", "figures", "controls"))
    parser.add_argument("source", type=Path, nargs="?", help="what the harness left: matrix.md, or a folder")
    given = parser.parse_args()
    if given.part != "pages" and (given.source is None or not given.source.exists()):
        print(f"{given.source}: there is no such file; run make {given.part}", file=sys.stderr)
        return 2
    try:
        if given.part == "pages":
            for part, (page, make) in PAGES.items():
                put(page, part, make())
        else:
            for page, text in made_from_runs(given.part, given.source):
                put(page, given.part, text)
    except DsParityError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
