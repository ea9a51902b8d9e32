"""RESULTS.md is written a section at a time."""

import re
from dataclasses import replace

import pytest

from benchmarks.results import ORDER, RESULTS, Section, divided, put, shown

ONE = Section("passes", "By passes", "Ours beside theirs.", ("passes", "ratio"), [("8", "1.02"), ("64", "1.01")])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "RESULTS.md"


def test_a_section_says_what_was_measured_where_and_with_which_versions(file):
    put(file, ONE)
    text = file.read_text()
    assert (
        "## By passes\n\nOurs beside theirs.\n\n| passes | ratio |\n| --- | --- |\n| 8 | 1.02 |\n| 64 | 1.01 |\n"
        in text
    )
    assert all(word in text for word in ("cores", "Python 3.", "torch 2.", "deepspeed 0."))


def test_a_section_replaces_itself_and_leaves_the_others_as_they_are(file):
    put(file, ONE)
    put(file, replace(ONE, name="memory", title="Memory", rows=[("1", "1.00")]))
    put(file, replace(ONE, rows=[("8", "1.05")]))
    text = file.read_text()
    assert "| 1 | 1.00 |" in text
    assert "| 8 | 1.05 |" in text
    assert "1.02" not in text
    assert text.count("<!-- end -->") == 2


def test_sections_stand_in_the_order_of_reading_whatever_was_measured_first(file):
    names = ("memory", "by-hand", "passes")
    for name in names:
        put(file, replace(ONE, name=name))
    text = file.read_text()
    assert sorted(names, key=ORDER.index) == sorted(names, key=lambda name: text.index(f"<!-- {name} -->"))


def test_writing_the_same_section_again_changes_nothing(file):
    put(file, ONE)
    before = file.read_text()
    put(file, ONE)
    assert file.read_text() == before


def test_a_ratio_is_shown_as_median_and_quartiles_of_rounds():
    assert shown(divided([2.0, 3.0, 4.0, 5.0, 6.0], [2.0] * 5)) == "2.00 (1.25 .. 2.75)"


def test_every_section_that_benchmarks_write_is_kept_in_the_order_of_reading():
    kept = re.findall(r"<!-- ([a-z0-9-]+) -->", RESULTS.read_text())
    assert tuple(name for name in kept if name != "end") == ORDER
