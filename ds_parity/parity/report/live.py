"""What makes plots live on the page: the library, the script that draws with it, and the values; nothing is loaded."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

from markupsafe import Markup

from ds_parity.parity.report.charts import Chart

_HERE = files("ds_parity.parity.report")


@cache
def scripts() -> tuple[str, ...]:
    """Return what a browser runs: uPlot, and the script that draws with it."""
    return tuple(_HERE.joinpath(path).read_text(encoding="utf-8") for path in ("uplot/uPlot.iife.min.js", "live.js"))


@cache
def style() -> str:
    """Return uPlot's style sheet."""
    return _HERE.joinpath("uplot/uPlot.min.css").read_text(encoding="utf-8")


def policy(*, runs: bool) -> str:
    """Return the page's content security policy: it loads nothing, and runs at most the two scripts above.

    Args:
        runs: whether the page has them.
    """
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts())
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    allowed = f"; script-src {hashes}" if runs else ""
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'{allowed}"


def values(charts: Sequence[Chart], key: str, step: int | None = None) -> Markup:
    """Return charts as JSON that stands in a script element, which it cannot end.

    Args:
        charts: of one picture.
        key: charts of one key show the same step.
        step: the one that they show at first; the last where it is None.
    """
    text = json.dumps({"key": key, "step": step, "charts": charts}, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
