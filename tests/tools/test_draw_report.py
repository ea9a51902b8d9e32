"""The picture of a report shows what the report says now, in both themes, and is drawn where there is a Chromium."""

import pytest
from PIL import Image, ImageStat

from tools import draw_report


def words(path):
    with Image.open(path) as picture:
        return picture.text["Description"]


def brightness(path):
    with Image.open(path) as picture:
        return ImageStat.Stat(picture.convert("L")).median[0]


@pytest.mark.parametrize("theme", draw_report.THEMES)
def test_the_picture_that_is_kept_shows_what_the_report_says(theme):
    """Its words stand in it as text: pixels are those of one browser with its fonts."""
    path = draw_report.FOLDER / f"report-{theme}.png"
    assert words(path) == draw_report.said(draw_report.report()), "the report changed: run `make pictures`"
    with Image.open(path) as picture:
        assert picture.width == draw_report.WIDTH * draw_report.SCALE
    assert (brightness(path) > 200) == (theme == "light")


def test_its_page_names_the_loop_that_the_documentation_speaks_of():
    assert draw_report.said(draw_report.report()).endswith("Likely cause: dp-mean-left-in")
    page = (draw_report.ROOT / "docs" / "ci.md").read_text()
    assert [f"pictures/report-{theme}.png#only-{theme}" in page for theme in draw_report.THEMES] == [True, True]


def test_without_a_chromium_it_says_so_and_leaves_the_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(draw_report, "FOLDER", tmp_path / "pictures")
    assert draw_report.main() == 0
    assert "Chromium, and there is none on this " in capsys.readouterr().out
    assert not (tmp_path / "pictures").exists()


@pytest.mark.skipif(draw_report.browser() is None, reason="there is no Chromium on this machine to draw with")
def test_it_is_drawn_in_both_themes(tmp_path):
    draw_report.draw(draw_report.browser(), tmp_path)
    light, dark = (tmp_path / f"report-{theme}.png" for theme in ("light", "dark"))
    assert words(light) == words(dark) == draw_report.said(draw_report.report())
    assert brightness(light) > 200
    assert brightness(dark) < 80
