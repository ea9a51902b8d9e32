"""The curves of online training that are kept are drawn from the figures that are kept, and can be read."""

import json
from itertools import product

import pytest
from draw_online import KEPT, PICTURES, SUBJECTS, ends_of
from draw_pictures import THEMES

from tests.pages import text
from tests.tools.test_draw_pictures import is_kept, is_readable_on_a_phone


@pytest.mark.parametrize(("name", "theme"), list(product(PICTURES, THEMES)))
def test_the_picture_that_is_kept_is_the_one_that_the_script_draws(name, theme):
    is_kept(PICTURES[name], name, theme)


@pytest.mark.parametrize("name", PICTURES)
def test_it_can_be_read_on_a_phone_and_no_text_touches_another(name):
    is_readable_on_a_phone(PICTURES[name])


def test_the_page_says_the_figures_that_are_kept():
    found = json.loads(KEPT.read_text())
    assert set(found["rewards"]) == set(SUBJECTS)
    page = text("online")
    for fault in SUBJECTS:
        for values in ends_of(found, fault):
            assert f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})" in page, fault
