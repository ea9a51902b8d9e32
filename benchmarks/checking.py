"""Whether a ratio has become worse than RESULTS.md says: `make bench-check`.

Benchmarks are measured again, into a file of their own, and each of their ratios is compared with the kept one. It has
become worse where its median lies beyond the kept quartile, on the side that is worse. A machine that was busy for a
minute moves medians too, so what has become worse is measured a second time, and fails where it is worse twice.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import INTO, RESULTS, sections

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a section's ratios.

    Attributes:
        test: that writes the section.
        more_is_better: a greater ratio is the better one.
        usual: it is measured where nothing else is asked for.
    """

    test: str
    more_is_better: bool = False
    usual: bool = False


CHECKED = {
    "by-hand": Kind("test_step.py::test_step_time", usual=True),
    "callers": Kind("test_callers.py::test_the_callers_step", usual=True),
    "whole-windows": Kind("test_callers.py::test_totals_of_whole_windows"),
    "accelerate": Kind("test_accelerate.py"),
    "limit": Kind("test_limit.py", more_is_better=True),
    "recipe": Kind("test_recipe.py", more_is_better=True, usual=True),
    "late": Kind("test_late.py", usual=True),
    "passes": Kind("test_growth.py"),
    "ranks": Kind("test_growth.py"),
    "sizes": Kind("test_growth.py"),
    "planning": Kind("test_plan.py"),
    "traces": Kind("test_traces.py", usual=True),
}
"""Sections whose ratios are compared. Others have counts, which their benchmarks assert, or differences."""

_CELL = re.compile(r"(-?[\d.]+) \((-?[\d.]+) \.\. (-?[\d.]+)\)")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measured ratio.

    Attributes:
        median: over rounds.
        low: the first quartile.
        high: the third quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, cell: str) -> Ratio | None:
        """Return what a cell of RESULTS.md says; None where it says no median with quartiles."""
        found = _CELL.match(cell)
        return None if found is None else cls(*map(float, found.groups()))

    def __str__(self) -> str:
        return f"{self.median:g} ({self.low:g} .. {self.high:g})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio beside the kept one.

    Attributes:
        name: section, row and column.
        kept: in RESULTS.md.
        measured: now; None where it was not measured.
        more_is_better: a greater ratio is the better one.
    """

    name: str
    kept: Ratio
    measured: Ratio | None
    more_is_better: bool

    @property
    def worse(self) -> bool:
        """Whether the median lies beyond the kept quartile on the side that is worse; also where there is none."""
        if self.measured is None:
            return True
        # Written so that a ratio that is NaN is worse.
        within = (
            self.measured.median >= self.kept.low if self.more_is_better else self.measured.median <= self.kept.high
        )
        return not within

    @property
    def better(self) -> bool:
        """Whether it lies beyond the other quartile."""
        if self.measured is None:
            return False
        median = self.measured.median
        return median > self.kept.high if self.more_is_better else median < self.kept.low

    def __str__(self) -> str:
        said = "worse" if self.worse else "better" if self.better else "as kept"
        now = "not measured" if self.measured is None else f"now {self.measured}"
        return f"{said:8} {self.name}: {now}, kept {self.kept}"


def ratios(section: str, text: str) -> dict[str, Ratio]:
    """Return the ratios of a section by names of their rows and columns."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(table) < 3:
        return {}
    header, _, *rows = table
    found = {}
    for row in rows:
        names = [cell for cell in row if Ratio.of(cell) is None]
        for column, cell in zip(header, row, strict=True):
            ratio = Ratio.of(cell)
            if ratio is not None:
                found[f"{section}, {', '.join(names)}, {column}"] = ratio
    return found


def judged(section: str, kept: str, measured: str) -> list[Verdict]:
    """Return a verdict on every kept ratio of a section."""
    now, more = ratios(section, measured), CHECKED[section].more_is_better
    return [Verdict(name, ratio, now.get(name), more) for name, ratio in ratios(section, kept).items()]


def checked(
    wanted: Iterable[str],
    kept: Mapping[str, str],
    measure: Callable[[Sequence[str]], Mapping[str, str]],
    say: Callable[[str], None] = print,
) -> bool:
    """Return whether no ratio has become worse; what has is measured once more.

    Args:
        wanted: names of sections.
        kept: their texts in RESULTS.md.
        measure: takes names of sections, and returns their new texts.
        say: takes a line at a time.
    """
    names = [name for name in wanted if ratios(name, kept.get(name, ""))]
    first = _verdicts(names, kept, measure(names))
    again = [name for name in names if any(one.worse for one in first[name])]
    second = _verdicts(again, kept, measure(again)) if again else {}
    worse = 0
    for name in names:
        twice = {one.name for one in second.get(name, ()) if one.worse}
        for one in first[name]:
            fails = one.worse and one.name in twice
            worse += fails
            say(f"{one}{'; worse when it was measured again, too' if fails else ''}")
    count = sum(map(len, first.values()))
    say(f"{count} ratios, {worse} of them worse than their quartiles in {RESULTS.name}, twice.")
    return bool(count) and not worse


def _verdicts(names: Sequence[str], kept: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[Verdict]]:
    return {name: judged(name, kept[name], now.get(name, "")) for name in names}


def measured(names: Sequence[str]) -> dict[str, str]:
    """Run the benchmarks of these sections, and return what they write."""
    tests = dict.fromkeys(str(ROOT / "benchmarks" / CHECKED[name].test) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / RESULTS.name
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-only", *tests]
        # A benchmark that fails writes nothing, so that its ratios are missing, which is worse.
        subprocess.run(command, cwd=ROOT, env={**os.environ, INTO: str(into)}, check=False)
        return sections(into)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print each ratio in words, and return 1 where one has become worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(CHECKED)}")
    given = parser.parse_args(arguments).sections
    unknown = set(given) - set(CHECKED)
    if unknown:
        parser.error(f"no section with ratios: {', '.join(sorted(unknown))}; choose of {', '.join(CHECKED)}")
    wanted = given or [name for name, kind in CHECKED.items() if kind.usual]
    return 0 if checked(wanted, sections(RESULTS), measured) else 1


if __name__ == "__main__":
    sys.exit(main())
