"""RESULTS.md: one section per benchmark, between marks, so that each can be measured again alone."""

import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
INTO = "DS_PARITY_RESULTS"
"""Environment variable: the file that sections are written to, in place of RESULTS.md."""
HEAD = """# What `make bench` measured

Each number is a ratio to a named rival that ran in the same processes, window by window in turn: the median over
rounds, and in brackets the first and third quartile. Times in seconds would be the machine's; it stands below each
table, with its load (the ranks' own and whatever else ran). `make bench` writes all sections, and `python -m pytest
benchmarks/test_step.py --benchmark-only -s` those of one file. `make bench-check` measures some again, and fails where
a ratio is worse than its quartiles here. `make pictures` draws the pictures.

<picture> <source media="(prefers-color-scheme: dark)" srcset="../docs/pictures/ratios-dark.svg"> <img alt="Time of a
window beside the engine driven by hand, by stage" src="../docs/pictures/ratios-light.svg"> </picture>

<picture> <source media="(prefers-color-scheme: dark)" srcset="../docs/pictures/growth-dark.svg"> <img alt="What a
window costs a rank, from 8 to 4,096 ranks" src="../docs/pictures/growth-light.svg"> </picture>
"""
# As they are read; the order in which they are measured is the files'.
ORDER = (
    *("by-hand", "callers", "whole-windows", "accelerate", "limit", "recipe", "online", "online-slow"),
    *("late", "passes", "ranks", "sizes", "memory", "import", "configuration"),
    *("planning", "quota", "waiting-0", "waiting-1", "waiting-2", "exchange", "scale", "prefetch", "traces"),
)
_SECTION = re.compile(r"^<!-- (\S+) -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        name: in ORDER.
        title: one line.
        said: what was measured beside what, in plain Markdown.
        header: one name per column.
        rows: the cells of each row.
    """

    name: str
    title: str
    said: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        table = [self.header, ["---"] * len(self.header), *self.rows]
        lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        measured = f"*{date.today()}: {machine()}; load average at the end {os.getloadavg()[0]:.1f}*"
        return f"## {self.title}\n\n{self.said}\n\n{lines}\n\n{measured}\n"


def sections(path: Path) -> dict[str, str]:
    """Return the texts of a file's sections by their names; none where there is no file."""
    return dict(_SECTION.findall(path.read_text())) if path.exists() else {}


def put(path: Path, section: Section) -> None:
    """Write a section; the others stay as they are."""
    assert section.name in ORDER
    kept = sections(path)
    kept[section.name] = section.text()
    parts = [f"<!-- {name} -->\n{kept[name]}<!-- end -->\n" for name in ORDER if name in kept]
    path.write_text("\n".join([HEAD, *parts]))


def shown(ratios: Sequence[float], digits: int = 2) -> str:
    """Return the median and the quartiles."""
    low, median, high = (f"{value:.{digits}f}" for value in statistics.quantiles(ratios, n=4))
    return f"{median} ({low} .. {high})"


def divided(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratios of rounds, each measured within one."""
    return [a / b for a, b in zip(over, under, strict=True)]


def machine() -> str:
    """Return processor and versions."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "deepspeed", "accelerate"))
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}; Python {platform.python_version()}, {packages}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
