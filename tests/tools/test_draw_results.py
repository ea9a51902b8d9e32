"""The pictures of the main ratios and of the growth with ranks are drawn from RESULTS.md, and can be read."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations, product

import pytest
from draw_pictures import FOLDER, THEMES, Sheet
from draw_results import GROUPS, PICTURES
from results_tables import rows

from tests.tools.test_draw_pictures import extent, texts


@pytest.mark.parametrize(("name", "theme"), list(product(PICTURES, THEMES)))
def test_the_picture_that_is_kept_is_the_one_that_the_script_draws(name, theme):
    assert (FOLDER / f"{name}-{theme}.svg").read_text() == PICTURES[name](Sheet(theme)), "run `make pictures`"


@pytest.mark.parametrize("name", PICTURES)
def test_it_can_be_read_on_a_phone_and_no_text_touches_another(name):
    light, dark = (PICTURES[name](Sheet(theme)) for theme in THEMES)
    assert texts(light) == texts(dark)
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', light)) * 360 / 480 >= 10
    root = ET.fromstring(light)
    lines = [(element.text, extent(element)) for element in root.iter() if element.tag.endswith("}text")]
    for words, (left, right, _, foot) in lines:
        assert 4 <= left < right <= 476, words
        assert foot < float(root.get("height")) - 5, words
    for (one, a), (other, b) in combinations(lines, 2):
        assert a[1] + 4 < b[0] or b[1] + 4 < a[0] or a[3] < b[2] or b[3] < a[2], (one, other)


def test_it_shows_the_median_of_every_stage():
    shown = texts(PICTURES["ratios"](Sheet("light")))
    for section in GROUPS:
        for _, *cells in rows(section):
            assert {cell.split()[0] for cell in cells} <= set(shown)
