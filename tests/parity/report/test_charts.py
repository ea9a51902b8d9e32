"""The values behind the live plots: what both runs share is drawn once, and every value can be read."""

import json
import math

import pytest

from ds_parity.parity.report.plots import pictures
from ds_parity.trace import Trace
from tests.parity.report.reported import EXACT, REASSOCIATED, compared, record, trace


def charts(name, *arguments, **options):
    """The charts of one picture by their titles."""
    (picture,) = [it for it in pictures(compared(*arguments, **options)) if it.name == name]
    json.dumps(picture.charts, allow_nan=False)
    return {chart["title"]: chart for chart in picture.charts}


LOSSES = {step: {"loss": 1.0 / step} for step in range(1, 5)}


def test_runs_that_are_alike_are_one_line_with_every_digit():
    loss = charts("curves", trace(4, LOSSES), trace(4, LOSSES))["loss"]
    assert loss["x"] == [1, 2, 3, 4]
    assert loss["series"] == [{"label": "both runs", "role": "both", "y": [1, 0.5, 1 / 3, 0.25]}]


def test_runs_that_differ_are_two_lines():
    loss = charts("curves", trace(4, LOSSES), trace(4, {**LOSSES, 2: {"loss": 0.75}}))["loss"]
    assert {one["label"]: one["y"][1] for one in loss["series"]} == {"reference": 0.5, "candidate": 0.75}


def test_a_value_that_never_moves_is_a_sentence_and_no_axis():
    found = charts("windows", trace(4), trace(4))
    assert found["rollouts in a step"] == {"title": "rollouts in a step", "said": "4 at every step, in both runs"}


def test_a_constant_of_one_run_is_drawn_where_the_other_moves():
    assert "said" not in charts("windows", trace(4), trace(4, {2: {"passes": 9}}))["passes in a step"]


def test_what_neither_run_has_is_left_out():
    bare = trace(3, {step: {"loss": None} for step in (1, 2, 3)})
    assert charts("curves", bare, bare).keys() == {"gradient norm before clipping", "learning rate"}


def test_a_step_that_is_no_number_is_a_gap_and_is_named():
    loss = charts("curves", trace(4, LOSSES), trace(4, {**LOSSES, 2: {"loss": math.nan}}))["loss"]
    candidate = loss["series"][1]
    assert candidate["y"] == [1, None, 1 / 3, 0.25]
    assert candidate["odd"] == "candidate: NaN or infinite in step 2"


def test_steps_that_were_skipped_are_said():
    skipped = {"skipped": True, "grad_norm": None}
    assert (
        charts("curves", trace(5, {2: skipped}), trace(5, {2: skipped, 4: skipped}))["skipped steps"]["said"] == "2, 4"
    )


def test_parameter_groups_have_a_line_each():
    groups = Trace(trace().header, tuple(record(step, lr=(0.1 * step, 0.2 * step)) for step in (1, 2)))
    labels = [one["label"] for one in charts("curves", groups, groups)["learning rate"]["series"]]
    assert labels == ["both runs, group 1", "both runs, group 2"]


def test_of_many_steps_the_least_and_the_greatest_of_a_stretch_are_drawn():
    loss = charts("curves", trace(1000), trace(1000, {777: {"loss": 9.0}}))["loss"]
    assert [one["label"] for one in loss["series"][2:]] == ["candidate, least", "candidate, greatest"]
    assert max(loss["series"][3]["y"]) == 9
    assert len(loss["x"]) == 250
    assert (loss["stretch"], loss["x"][:2]) == (4, [2.5, 6.5])


@pytest.mark.parametrize("tier", [EXACT, REASSOCIATED])
def test_differences_stand_on_an_axis_that_has_a_place_for_0(tier):
    found = charts("differences", trace(3), trace(3, {2: {"loss": 0.5 + 5e-5}}), tier=tier)[
        "relative difference in loss"
    ]
    heights = {label: height for height, label in found["ticks"]}
    by_role = {one["role"]: one for one in found["series"]}
    assert by_role["over"]["shown"][1] == pytest.approx(1e-4)
    assert by_role["over"]["y"][1] == pytest.approx(heights["1e-04"], abs=1e-3)
    assert (by_role["within"]["shown"], by_role["within"]["y"]) == ([0, None, 0], [heights["0"], None, heights["0"]])
    assert found["range"][0] < heights["0"] < found["range"][1]
    bound = by_role["bound"]["shown"]
    assert bound == [0, 0, 0] if tier is EXACT else bound[0] < bound[1] < bound[2]


def test_what_only_one_run_has_stands_on_a_line_of_its_own():
    found = charts("differences", trace(2), trace(4))["relative difference in loss"]
    odd = found["series"][-1]
    assert (odd["label"], odd["shown"]) == ("NaN, infinite or in one run only", [None] * 4)
    assert odd["y"][:2] == [None, None]
    assert odd["y"][2] == odd["y"][3] == {label: height for height, label in found["ticks"]}["NaN, inf, absent"]
