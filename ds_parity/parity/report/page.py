"""The page: one HTML file that opens from the disk and needs nothing else."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ds_parity._version import __version__
from ds_parity.parity.comparison.fields import Difference, FieldFound
from ds_parity.parity.diagnosis import Cause, Diagnosis, grouped
from ds_parity.parity.report import live
from ds_parity.parity.report.condense import TableLine, lines
from ds_parity.parity.report.contents import UNKNOWN, Compared, Contents, Side
from ds_parity.parity.report.plots import Picture
from ds_parity.parity.report.terminal import COLUMNS, how_sure, verdict
from ds_parity.parity.report.words import reference_named

_DIGITS = 12
_ABOUT = {
    "uniform": "Every rank runs the same number of full micro-batches in each step. Bare DeepSpeed counts only these.",
    "ragged": "Micro-batches have different sizes, steps different numbers of passes, and some ranks run out of data.",
}
"""What the scenarios of `ds-parity verify` are like."""


@dataclass(frozen=True)
class _Section:
    """One comparison, as the template takes it.

    Attributes:
        causes: in groups of equal likelihood, the likeliest first; in each the causes that have one evidence are
            together.
    """

    anchor: str
    title: str
    scenario: str
    about: str
    equal: bool
    verdict: str
    details: str
    first: Difference | None
    causes: tuple[tuple[tuple[Cause, ...], ...], ...]
    diagnosis: Diagnosis
    pictures: tuple[Picture, ...]
    found: tuple[FieldFound, ...]
    lines: tuple[TableLine, ...]


def render(contents: Contents, drawn: tuple[tuple[Picture, ...], ...]) -> str:
    """Return the page: what differs comes before what is equal, and its cause before all else.

    Args:
        contents: what to report.
        drawn: the pictures of each comparison.
    """
    environment = Environment(
        loader=PackageLoader("ds_parity.parity.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"inline": _inline, "exact": _exact, "size": _size, "json": _json, "values": live.values}
    environment.filters["how_sure"] = how_sure
    every = (_section(f"c{at}", *one) for at, one in enumerate(zip(contents.compared, drawn, strict=True)))
    sections = sorted(every, key=lambda section: section.equal)
    runs = any(picture.charts for pictures in drawn for picture in pictures)
    return environment.get_template("report.html.j2").render(
        contents=contents,
        sections=sections,
        first=next((section for section in sections if section.first), None),
        columns=COLUMNS,
        facts=_facts(contents),
        sides=[_side(one, name) for one in contents.failed_first for name in ("reference", "candidate")],
        policy=live.policy(runs=runs),
        scripts=tuple(map(Markup, live.scripts())) if runs else (),
        library_style=Markup(live.style()) if runs else "",
        reference_named=reference_named,
    )


def _section(anchor: str, compared: Compared, pictures: tuple[Picture, ...]) -> _Section:
    comparison = compared.comparison
    return _Section(
        anchor=anchor,
        title=compared.title,
        scenario=compared.scenario,
        about=_ABOUT.get(compared.scenario, ""),
        equal=comparison.equal,
        verdict=compared.verdict,
        details=verdict(comparison),
        first=comparison.first,
        causes=_ranked(compared.diagnosis.causes),
        diagnosis=compared.diagnosis,
        pictures=pictures,
        found=comparison.found,
        lines=lines(comparison),
    )


def _ranked(causes: tuple[Cause, ...]) -> tuple[tuple[tuple[Cause, ...], ...], ...]:
    """Causes by evidence, and those together whose likeliest are equally likely: their order would mean nothing."""
    alike = groupby(grouped(causes), key=lambda group: group[0].likelihood)
    return tuple(tuple(groups) for _, groups in alike)


def _facts(contents: Contents) -> dict[str, str]:
    made = {"date": f"{contents.made:%Y-%m-%d %H:%M} UTC", "compared with": f"ds-parity {__version__}"}
    return {**made, **contents.provenance, **contents.facts}


def _side(compared: Compared, name: str) -> dict[str, str]:
    side: Side = getattr(compared, name)
    header = side.trace.header
    return {
        "trace": side.path,
        "as": f"{name}, {compared.comparison.tier} tier ({compared.comparison.dtype})",
        "engine": header.engine,
        "scenario": header.scenario or UNKNOWN,
        "ranks": str(header.ranks or UNKNOWN),
        "seed": "none" if header.seed is None else str(header.seed),
        "device": header.device or UNKNOWN,
        "versions": ", ".join(f"{package} {version}" for package, version in (header.versions or {}).items())
        or UNKNOWN,
        "configuration": (header.config_hash or UNKNOWN)[:_DIGITS],
    }


def _inline(picture: Picture) -> str:
    return f"data:image/png;base64,{b64encode(picture.png).decode()}"


def _exact(value: object) -> str:
    """Every digit of a value, since the last one can be the difference."""
    return "absent" if value is None else value if isinstance(value, str) else repr(value)


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, default=str)
