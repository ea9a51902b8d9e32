"""Draw the picture of a report for the documentation, in a light and in a dark theme.

    python tools/draw_report.py

writes docs/pictures/report-THEME.png: the top of the report of two kept traces (tools/report_traces/), as headless
Chromium shows it. The traces are those of `ds-parity controls ds_configs/zero2_fp32.json --only dp-mean-left-in`.
Without Chromium the pictures stay as they are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.parity.report import Contents, Side, of_traces, write
from ds_parity.trace import read_trace

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
TRACES = ROOT / "tools" / "report_traces"
# By theme: what Chromium calls it.
THEMES = {"light": 1, "dark": 0}
WIDTH, HEIGHT, SCALE = 1000, 945, 2
_COLOURS = 64
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip


def report() -> Contents:
    """Return what the report is of. Its date is fixed, so that the page is the same every time."""
    reference, candidate = (read_trace(TRACES / f"{side}.jsonl") for side in ("reference", "candidate"))
    comparison = compare(reference, candidate, Tier.REASSOCIATED)
    diagnosis = diagnose(reference, candidate, comparison)
    sides = (Side(trace, f"runs/{side}.jsonl") for trace, side in ((reference, "reference"), (candidate, "candidate")))
    return of_traces(comparison, *sides, diagnosis, made=datetime(2026, 1, 1, tzinfo=UTC))


def said(contents: Contents) -> str:
    """Return the verdict of a report and its first cause: what its picture shows, for those who cannot see it."""
    found = contents.compared[0].diagnosis
    named = f"Likely cause: {found.causes[0].name}" if found.causes else f"Cause unknown: {', '.join(found.classes)}"
    return f"{contents.verdict}. {named}"


def browser() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def draw(chromium: str, folder: Path) -> None:
    """Write the picture in every theme.

    Args:
        chromium: path of the browser.
        folder: where to write.
    """
    contents = report()
    with tempfile.TemporaryDirectory() as temporary:
        page = write(contents, Path(temporary), None)[-1]
        for theme, number in THEMES.items():
            shot = Path(temporary) / f"{theme}.png"
            command = [
                chromium, *_QUIET, f"--user-data-dir={temporary}/profile",
                f"--blink-settings=preferredColorScheme={number}", f"--window-size={WIDTH},{HEIGHT}",
                f"--force-device-scale-factor={SCALE}", f"--screenshot={shot}", page.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            words = PngInfo()
            words.add_text("Description", said(contents))
            small = Image.open(shot).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
            small.save(folder / f"report-{theme}.png", optimize=True, pnginfo=words)


def main() -> int:
    """Draw where there is a Chromium, and say so where there is none."""
    chromium = browser()
    if chromium is None:
        print(
            "docs/pictures/report-*.png stay as they are: they are drawn by Chromium, and there is none on this "
            f"machine ({', '.join(_BROWSERS)}). Install it (apt-get install chromium), and run this again."
        )
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    draw(chromium, FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
