"""docs/versions.md: what was not run is never shown as right, and the table in code agrees with what was run."""

import json
from pathlib import Path

import pytest

from ds_parity.config.features import FEATURES, MOVED_OFFLOADED, named
from ds_parity.config.releases import release
from ds_parity.config.versions import MEASURED, Verdict, verdict
from ds_parity.parity.matrix.cells import cells
from tools import update_docs
from tools.versions import measure, page

ROOT = Path(__file__).parents[2]
RAN = page.results()
PARTS = [part for part in update_docs.PAGES if part.startswith("releases")]


def row_of(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return dict(zip(map(str, MEASURED), line.strip("| ").split(" | ")[1:], strict=True))


def cell(status, name="bf16", stage=2, **others):
    return {"group": "precision", "name": name, "stage": stage, "status": status, **others}


def ran(version, *cells, **tests):
    return {version: {"deepspeed": version, "cells": list(cells), "tests": tests, "ran_with": {"torch": "2.13.0"}}}


@pytest.mark.parametrize("part", PARTS)
def test_the_page_shows_what_is_generated(part):
    shown_on, make = update_docs.PAGES[part]
    assert update_docs.shown(shown_on, part) == make(), "run `make pages`"


def test_the_page_is_in_the_navigation():
    assert "versions.md" in (ROOT / "mkdocs.yml").read_text()


def test_what_nobody_has_run_is_never_right():
    text = page.features({})
    for feature in FEATURES:
        assert {shown.split(" [")[0] for shown in row_of(text, feature.name).values()} <= {"not run", "refused"}
    assert f"0 of {len(cells())}" in page.matrix({})


def test_a_row_that_was_run_is_counted_where_it_was_run():
    shown = row_of(page.features(ran("0.19.0", cell("right"))), "ZeRO 2 in bf16")
    assert shown["0.19.0"].startswith("right (1 of ")
    assert shown["0.18.4"] == "not run"


def test_a_corrected_row_and_an_entry_of_the_table_make_a_feature_corrected():
    text = page.features({**ran("0.19.0", cell("corrected")), **ran("0.18.9", cell("right"))})
    shown = row_of(text, "ZeRO 2 in bf16")
    assert shown["0.19.0"].startswith("corrected (1 of ")
    assert shown["0.18.9"].startswith("corrected (1 of ")
    assert shown["0.18.9"].endswith("]")


@pytest.mark.parametrize("status", ["differs", "failed"])
def test_one_wrong_row_is_shown_in_the_cell_and_named_below(status):
    known = ran("0.19.0", cell(status, why="torch: it differs"), cell("right", name="overlap_comm, bf16"))
    assert row_of(page.features(known), "ZeRO 2 in bf16")["0.19.0"].startswith("**1 wrong** (1 of ")
    assert f"- 0.19.0, precision: bf16, ZeRO 2: {status}. torch: it differs" in page.matrix(known)


def test_a_row_that_raises_as_bare_deepspeed_does_is_neither_right_nor_wrong():
    known = ran("0.19.0", cell("raises", why="torch: ds_parity: KeyError: 1"), cell("right", name="overlap_comm, bf16"))
    assert row_of(page.features(known), "ZeRO 2 in bf16")["0.19.0"].startswith("right (1 of ")
    assert "| 0.19.0 | 2.13.0 | 2 of " in page.matrix(known)
    assert "| 1 | 0 | 0 | 1 | 0 |" in page.matrix(known)
    assert "- 0.19.0, precision: bf16, ZeRO 2: raises. torch: ds_parity: KeyError: 1" in page.matrix(known)


BARE = {"check": "deepspeed", "status": "corrected", "detail": "known (bare, deepspeed: KeyError: 7)"}
OURS = {"check": "torch", "status": "failed", "detail": "ds_parity: KeyError: 1"}
PROBED = {"check": "probe", "status": "failed", "detail": "a-row-zero2/probe: KeyError: 1"}


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([BARE, OURS, PROBED], "raises"),
        ([OURS], "failed"),
        ([{**BARE, "detail": "known (bare, deepspeed: ValueError: 7)"}, OURS], "failed"),
        ([{**BARE, "detail": "known (bare, deepspeed: KeyError: no such key)"}, OURS], "failed"),
        ([BARE, OURS, {**OURS, "status": "differs", "detail": "off by one"}], "failed"),
        ([BARE, OURS, {**OURS, "detail": "torch: KeyError: 1"}], "failed"),
    ],
    ids=["as bare DeepSpeed", "alone", "another error", "another message", "something differs, too", "the reference"],
)
def test_an_error_is_excused_only_where_bare_deepspeed_ends_in_it(tmp_path, findings, status):
    facts = {"deepspeed": "0.19.0", "torch": "2.13.0", "accelerator": "cpu", "took": "1 s"}
    matrix = {"facts": facts, "cells": [{**cell("failed"), "seconds": 1.0, "findings": findings}]}
    (kept,) = measure.with_cells(measure.load(tmp_path, "0.19.0"), matrix)["cells"]
    assert kept["status"] == status


def test_what_was_not_run_is_not_kept(tmp_path):
    facts = {"deepspeed": "0.19.0", "torch": "2.13.0", "accelerator": "cpu", "took": "1 s"}
    matrix = {"facts": facts, "cells": [{**cell("not run"), "seconds": 0.0, "findings": []}]}
    before = measure.load(tmp_path, "0.19.0") | {"cells": [cell("differs"), cell("right", stage=3)]}
    assert measure.with_cells(before, matrix)["cells"] == [cell("right", stage=3)]


def test_a_failed_test_is_shown_as_wrong():
    known = ran("0.19.3", **{"tests/distributed/test_callers_coalesced.py": {"passed": 4, "failed": 1}})
    assert row_of(page.features(known), "coalesce_grad_reduction()")["0.19.3"] == "**1 wrong** (5 tests)"
    assert "4 passed, 1 failed" in page.tests(known)


def test_what_the_table_refuses_is_refused_whatever_was_run():
    assert row_of(page.features({}), "coalesce_grad_reduction()")["0.18.4"].startswith("refused [")


@pytest.mark.parametrize("version", RAN)
def test_results_are_of_releases_that_the_table_knows(version):
    assert release(version) in MEASURED
    assert RAN[version]["deepspeed"] == version
    assert RAN[version]["ran_with"]["torch"]


@pytest.mark.parametrize("version", RAN)
def test_no_row_that_was_run_contradicts_the_table(version):
    places = page.places_of_features()
    for one in RAN[version]["cells"]:
        for feature in FEATURES:
            if (one["group"], one["name"], one["stage"]) in places[feature.name]:
                refused = verdict(feature, release(version)) is Verdict.REFUSED
                assert not (refused and one["status"] in ("right", "corrected")), (feature.name, one)


def test_every_feature_has_rows_of_the_matrix_or_tests():
    places = page.places_of_features()
    bare = [feature.name for feature in FEATURES if not places[feature.name] and feature.name not in page._TESTS]
    assert not bare


def test_a_feature_that_a_call_asks_for_is_shown_by_the_rows_that_call_it():
    (place,) = page.places_of_features()[MOVED_OFFLOADED.name]
    assert place == ("offload_states", "offload_optimizer, bf16", 2)
    shown = row_of(page.features(ran("0.19.0", cell("right", place[1], 2) | {"group": place[0]})), MOVED_OFFLOADED.name)
    assert shown["0.18.9"].startswith("refused [")
    assert shown["0.19.0"] == "right (1 of 1 rows)"


def test_a_run_replaces_its_own_cells_alone(tmp_path):
    found = {"check": "torch", "status": "differs", "detail": "off by one"}
    matrix = {
        "facts": {"deepspeed": "0.19.0", "torch": "2.13.0", "accelerator": "cpu", "took": "1 s"},
        "cells": [{**cell("differs"), "seconds": 1.0, "findings": [found]}],
    }
    known = measure.with_cells(measure.load(tmp_path, "0.19.0"), matrix)
    other = {**matrix, "cells": [{**cell("right", stage=3), "seconds": 1.0, "findings": []}]}
    mended = {**matrix, "cells": [{**cell("right"), "seconds": 1.0, "findings": []}]}
    assert known["cells"] == [cell("differs", why="torch: off by one")]
    processor = "cpu, fp16 computed by torch"
    known = measure.with_cells({**known, "ran_with": {"accelerator": processor}}, other)
    known = measure.with_cells(known, mended)
    assert known["ran_with"]["accelerator"] == processor
    assert known["cells"] == [cell("right"), cell("right", stage=3)]
    assert json.loads(measure.store(tmp_path, known).read_text()) == known
    assert measure.load(tmp_path, "0.19.0") == known


def test_tests_are_counted_by_file(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.engine.test_division" name="a"/>'
        '<testcase classname="tests.engine.test_division" name="b"><failure message="x"/></testcase>'
        '<testcase classname="tests.engine.test_division.TestThat" name="c"><skipped/></testcase>'
        '<testcase classname="tests.distributed.test_passes" name="d"><error message="x"/></testcase>'
        '<testcase classname="" name="tests.distributed.test_pipelines"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    known = measure.with_tests(measure.load(tmp_path, "0.19.0"), report)
    assert known["tests"] == {
        "tests/engine/test_division.py": {"passed": 1, "failed": 1, "skipped": 1},
        "tests/distributed/test_passes.py": {"failed": 1},
        "tests/distributed/test_pipelines.py": {"skipped": 1},
    }


def test_features_without_a_configuration_are_shown_by_what_exists():
    for files in page._TESTS.values():
        assert all((ROOT / file).exists() for file in files)
    assert all(named(name) for name in page._TESTS)


def test_notes_of_a_cell_stand_in_one_pair_of_brackets():
    """Two in a row are a link in Markdown, to a page that is not there."""
    assert "] [" not in page.features(page.results())
