"""The pages in a browser: plots are drawn under the page's own rules, and a phone shows no wider page than its screen.

Needs chromium, which is no package of Python's: `apt-get install chromium`.
"""

import html
import re
import shutil
import subprocess

import pytest

from ds_parity.parity.matrix import pages
from ds_parity.parity.matrix.cells import Cell
from ds_parity.parity.matrix.results import CellFinding, Result, Status
from ds_parity.parity.matrix.variant import STAGES
from ds_parity.parity.matrix.variants import VARIANTS
from ds_parity.parity.report.page import render
from ds_parity.parity.report.plots import pictures
from tests.parity.report.reported import compared, contents, trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine to open a page with")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--virtual-time-budget=3000",
)  # fmt: skip
BAD = compared(trace(5), trace(5, {3: {"loss": 0.75, "grad_norm": 3.0}}))
GOOD = compared(trace(5, {2: {"loss": 0.25}}), trace(5, {2: {"loss": 0.25}}), against="deepspeed")


def opened(path, folder):
    """The page as it stands once its scripts have run."""
    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def width_on(screen, page, folder):
    """How wide a page is in a frame as wide as a screen."""
    frame = f'<iframe width="{screen}" height="800" style="border:0" srcdoc="{html.escape(page)}"></iframe>'
    measured = "document.querySelector('iframe').contentDocument.documentElement.scrollWidth"
    script = f"addEventListener('load', () => setTimeout(() => document.title = 'width ' + {measured}, 500))"
    path = folder / f"{screen}.html"
    path.write_text(f"<!doctype html><script>{script}</script>{frame}", encoding="utf-8")
    return int(re.search(r"<title>width (\d+)", opened(path, folder))[1])


@pytest.fixture(scope="module")
def report():
    drawn = tuple(pictures(one) for one in (BAD, GOOD))
    return render(contents(BAD, GOOD), drawn)


def test_every_plot_is_drawn_and_reads_the_last_step(report, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(report, encoding="utf-8")
    shown = opened(path, tmp_path)
    assert shown.count('class="u-wrap"') == len(re.findall('"x":', report)) > 4
    assert shown.count('<figure class="live">') == report.count("<figure>")
    assert {"<b>step 3</b>", "<b>step 5</b>"} == set(re.findall(r"<b>step \d</b>", shown)), "difference, and end"
    # They are drawn again from the same values when the theme changes.
    assert shown.count('<script type="application/json"') == report.count('<script type="application/json"') > 3


@pytest.mark.parametrize("screen", [390, 768, 1400])
def test_the_report_is_as_wide_as_the_screen(report, screen, tmp_path):
    assert width_on(screen, report, tmp_path) == screen


@pytest.mark.parametrize("screen", [390, 768, 1400])
def test_the_matrix_is_as_wide_as_the_screen(screen, tmp_path):
    """Its table is wider than a phone, and scrolls in its own box."""
    long = "tools/deepspeed_faults/a_script_with_a_name_that_is_as_long_as_they_come.py" * 2
    said = "as expected, with the greatest error that is allowed in all of the steps"
    findings = (CellFinding("refusal", Status.REFUSED, long), CellFinding("probe", Status.RIGHT, said))
    results = [Result(Cell(variant, stage), findings, 1.0) for variant in VARIANTS for stage in STAGES]
    pages.write(results, {"accelerator": "cpu"}, tmp_path / "matrix.html")
    assert width_on(screen, (tmp_path / "matrix.html").read_text(), tmp_path) == screen
