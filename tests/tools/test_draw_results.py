"""The pictures of the main ratios and of the growth with ranks are drawn from RESULTS.md, and can be read."""

from itertools import product

import pytest
from draw_pictures import THEMES, Sheet
from draw_results import GROUPS, PICTURES
from results_tables import OWN, rows

from tests.tools.test_draw_pictures import is_kept, is_readable_on_a_phone, texts


@pytest.mark.parametrize(("name", "theme"), list(product(PICTURES, THEMES)))
def test_the_picture_that_is_kept_is_the_one_that_the_script_draws(name, theme):
    is_kept(PICTURES[name], name, theme)


@pytest.mark.parametrize("name", PICTURES)
def test_it_can_be_read_on_a_phone_and_no_text_touches_another(name):
    is_readable_on_a_phone(PICTURES[name])


def test_it_shows_the_median_of_every_stage():
    shown = texts(PICTURES["ratios"](Sheet("light")))
    for section in GROUPS:
        for name, *cells in rows(section):
            # A share of time is no ratio.
            assert ({cell.split()[0] for cell in cells} <= set(shown)) is (name != OWN)
