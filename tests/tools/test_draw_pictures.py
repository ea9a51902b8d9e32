"""The pictures that are kept are those that the script draws, and they say what the code and the formula do."""

import re
import tomllib
import xml.etree.ElementTree as ET
from fractions import Fraction
from importlib import import_module
from itertools import combinations, product

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from ds_parity.window import Counts, Ledger, PassTotals, Rules
from tools import draw_pictures
from tools.draw_pictures import HOPS, PASSES, PICTURES, TARGET, THEMES, Sheet

KEPT = list(product(PICTURES, THEMES))


def texts(svg):
    return [
        " ".join("".join(element.itertext()).split()) for element in ET.fromstring(svg).iter() if "text" in element.tag
    ]


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def is_kept(draw, name, theme):
    """Assert that the picture in the folder is the one that `draw` makes."""
    kept = draw_pictures.FOLDER / f"{name}-{theme}.svg"
    assert kept.read_text(encoding="utf-8") == draw(Sheet(theme)), "the script changed: run `make pictures`"


def is_readable_on_a_phone(draw):
    """Assert that no text of a picture is small, lies outside it, or touches another one, and that themes agree."""
    light, dark = (draw(Sheet(theme)) for theme in THEMES)
    assert texts(light) == texts(dark)
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', light)) * 360 / 480 >= 10
    root = ET.fromstring(light)
    lines = [(element.text, extent(element)) for element in root.iter() if element.tag.endswith("}text")]
    for words, (left, right, _, foot) in lines:
        assert 4 <= left < right <= 476, words
        assert foot < float(root.get("height")) - 5, words
    for (one, a), (other, b) in combinations(lines, 2):
        assert a[1] + 4 < b[0] or b[1] + 4 < a[0] or a[3] < b[2] or b[3] < a[2], (one, other)


@pytest.mark.parametrize(("name", "theme"), KEPT)
def test_the_picture_that_is_kept_is_the_one_that_the_script_draws(name, theme):
    is_kept(PICTURES[name], name, theme)


@pytest.mark.parametrize(("name", "theme"), KEPT)
def test_it_is_drawn_alike_every_time_and_loads_nothing(name, theme):
    svg = PICTURES[name](Sheet(theme))
    assert PICTURES[name](Sheet(theme)) == svg
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|href|url\((?!#)|@import|<image|<script|font-face", svg)


@pytest.mark.parametrize("name", PICTURES)
def test_both_themes_say_the_same(name):
    light, dark = (PICTURES[name](Sheet(theme)) for theme in THEMES)
    assert texts(light) == texts(dark)
    assert light != dark


@pytest.mark.parametrize("theme", THEMES)
def test_every_text_can_be_told_from_what_lies_below_it(theme):
    """The ratio that the accessibility guidelines ask for in text of ordinary size."""
    palette = THEMES[theme]
    for ink, paper in draw_pictures.TEXT_ON:
        assert contrast(palette[ink], palette[paper]) >= 4.5, (ink, paper)


@pytest.mark.parametrize(("name", "theme"), KEPT)
def test_its_smallest_text_is_read_on_a_phone(name, theme):
    """A picture is as wide as a phone's page, 360 pixels, and its letters are 10 pixels high at least."""
    svg = PICTURES[name](Sheet(theme))
    width = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)]
    assert min(sizes) * 360 / width >= 10


def extent(element):
    """Left and right end, top and foot of a line of text in a wide font, that of matplotlib."""
    properties = FontProperties(family=["DejaVu Sans Mono" if element.get("font-family") else "DejaVu Sans"])
    properties.set_weight("bold" if element.get("font-weight") else "normal")
    size, x, y = (float(element.get(name)) for name in ("font-size", "x", "y"))
    width = TextPath((0, 0), element.text, size=size, prop=properties).get_extents().width
    left = {"start": x, "middle": x - width / 2, "end": x - width}[element.get("text-anchor")]
    return left, left + width, y - 0.75 * size, y + 0.2 * size


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_leaves_the_picture_or_touches_another(name):
    root = ET.fromstring(PICTURES[name](Sheet("light")))
    lines = [(element.text, extent(element)) for element in root.iter() if element.tag.endswith("}text")]
    for words, (left, right, _, foot) in lines:
        assert 8 <= left < right <= float(root.get("width")) - 8, words
        assert foot < float(root.get("height")) - 5, words
    for (one, a), (other, b) in combinations(lines, 2):
        assert a[1] + 4 < b[0] or b[1] + 4 < a[0] or a[3] < b[2] or b[3] < a[2], (one, other)


def test_a_description_for_those_who_cannot_see_it_is_in_each():
    for name in PICTURES:
        root = ET.fromstring(PICTURES[name](Sheet("light")))
        assert root.get("role") == "img"
        assert [child.tag.rpartition("}")[2] for child in root][:2] == ["title", "desc"]
        assert all(len(child.text) > 20 for child in list(root)[:2])


class TestWindow:
    def test_the_numbers_are_those_of_the_formula(self):
        weighed = sum(weight * Fraction(mean) for ranks in PASSES for weight, mean in ranks)
        total = sum(weight for ranks in PASSES for weight, _ in ranks)
        said = " ".join(texts(PICTURES["window"](Sheet("light"))))
        assert f"{float(weighed / TARGET):g} × {TARGET} / {total} = {float(weighed / total):g}" in said
        assert total != TARGET, "without a correction there is nothing to show"

    def test_the_window_of_the_package_comes_to_the_same(self):
        ledger = Ledger(Rules(TARGET, ranks=2))
        passes = [PassTotals.of([Counts(weight, 0, 0) for weight, _ in ranks]) for ranks in PASSES]
        windows = [ledger.count(totals) for totals in passes]
        assert [window.closed for window in windows] == [False, False, True]
        assert (windows[-1].expected, windows[-1].weight) == (TARGET, 10)
        assert windows[-1].correction == TARGET / 10

    def test_an_idle_pass_and_micro_batches_of_other_sizes_are_in_it(self):
        weights = [weight for ranks in PASSES for weight, _ in ranks]
        assert 0 in weights
        assert len({weight for weight in weights if weight}) > 1
        assert "idle pass" in " ".join(texts(PICTURES["window"](Sheet("light"))))


class TestArchitecture:
    def test_the_hops_are_names_of_the_code(self):
        assert len(HOPS) == 6
        for module, name, _ in HOPS:
            found = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            assert f"{name}" in " ".join(texts(PICTURES["architecture"](Sheet("light"))))

    def test_the_floors_are_those_that_imports_are_checked_by(self):
        linter = tomllib.loads((draw_pictures.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
        layers = next(one["layers"] for one in linter["contracts"] if one["name"] == "imports run downwards only")
        said = texts(PICTURES["architecture"](Sheet("light")))
        for floor in layers:
            for room in floor.replace("ds_parity.", "").split(" | "):
                assert room in said or f"{room}.py" in said, room
