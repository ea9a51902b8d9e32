"""The values behind the live plots: what both runs share is drawn once, and every value can be read."""

import json
import math
import re

import pytest
from matplotlib.figure import Figure

from ds_parity.parity.report.plots import pictures
from ds_parity.trace import Trace
from tests.parity.report.reported import EXACT, REASSOCIATED, compared, record, trace


@pytest.fixture(autouse=True)
def drawn_and_not_rendered(monkeypatch):
    """Values are what is read here: pictures are composed, and test_report_plots.py looks at their pixels."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, to, **options: None)


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
        charts("curves", trace(5, {2: skipped}), trace(5, {2: skipped, 4: skipped}))["skipped steps"]["said"]
        == "reference: 2; candidate: 2, 4"
    )
    assert (
        charts("curves", trace(5, {2: skipped}), trace(5, {2: skipped}))["skipped steps"]["said"] == "2, in both runs"
    )
    only_one = charts("curves", trace(5), trace(5, {4: skipped}))["skipped steps"]["said"]
    assert only_one == "reference: none; candidate: 4"


LONG = 4000
"""Steps of a run from which only some points are kept for the picture."""


@pytest.mark.parametrize(("bad", "said"), [(range(2, 2002), "and 1988 more"), ((5, 1999), "5, 1999")])
def test_all_steps_that_are_no_number_are_counted_and_the_first_are_listed(bad, said):
    nan = {step: {"loss": math.nan} for step in bad}
    loss = charts("curves", trace(LONG), trace(LONG, nan))["loss"]
    (odd,) = [one["odd"] for one in loss["series"] if "odd" in one]
    listed = ", ".join(map(str, list(bad)[:12]))
    assert odd.startswith(f"candidate: NaN or infinite in steps {listed}")
    assert odd.endswith(said)


def test_all_skipped_steps_are_counted_and_the_first_are_listed():
    skipped = {step: {"skipped": True, "grad_norm": None} for step in range(2, 2002)}
    said = charts("curves", trace(LONG, skipped), trace(LONG, skipped))["skipped steps"]["said"]
    assert said == f"{', '.join(map(str, range(2, 14)))} and 1988 more, in both runs"


def test_a_skipped_step_between_those_that_are_kept_tells_runs_apart():
    """Of 2,000 skipped steps a few hundred are kept for the picture; the runs differ in one of the others."""
    skipped = {step: {"skipped": True, "grad_norm": None} for step in range(2, 2002)}
    other = {step: skipped[step] for step in skipped if step != 1000}
    said = charts("curves", trace(LONG, skipped), trace(LONG, other))["skipped steps"]["said"]
    assert re.findall(r"and (\d+) more", said) == ["1988", "1987"]


def test_runs_whose_bad_steps_are_others_are_not_alike():
    """Both curves are equal where there is a value to draw: each stretch has others that are."""
    one, other = ({step: {"loss": math.nan} for step in range(2, 2002) if step != without} for without in (1003, 1004))
    loss = charts("curves", trace(LONG, one), trace(LONG, other))["loss"]
    assert {"reference, least", "candidate, least"} <= {one["label"] for one in loss["series"]}


def test_parameter_groups_have_a_line_each():
    groups = Trace(trace().header, tuple(record(step, lr=(0.1 * step, 0.2 * step)) for step in (1, 2)))
    labels = [one["label"] for one in charts("curves", groups, groups)["learning rate"]["series"]]
    assert labels == ["both runs, group 1", "both runs, group 2"]


def rates(values):
    """A run whose learning rates are these, times the step."""
    return Trace(trace().header, tuple(record(step, lr=tuple(lr * step for lr in values)) for step in (1, 2)))


def lr_labels(one, other):
    return [it["label"] for it in charts("curves", rates(one), rates(other))["learning rate"]["series"]]


def test_a_parameter_group_keeps_its_number_where_others_are_equal():
    assert lr_labels((1, 1, 2, 1), (1, 1, 2, 1)) == ["both runs, groups 1, 2 and 4", "both runs, group 3"]
    assert lr_labels((1, 1, 2), (1, 1, 3)) == [
        "reference, groups 1 and 2", "reference, group 3", "candidate, groups 1 and 2", "candidate, group 3",
    ]  # fmt: skip


def test_runs_with_the_same_values_in_other_groups_are_not_alike():
    assert lr_labels((1, 1, 2), (1, 2, 1))[::2] == ["reference, groups 1 and 2", "candidate, groups 1 and 3"]


def test_groups_that_all_have_one_value_are_not_numbered():
    assert lr_labels((1, 1), (2, 3)) == ["reference", "candidate, group 1", "candidate, group 2"]


def test_groups_that_are_not_drawn_are_said():
    """A ninth group may differ, and nothing may be said of it."""
    found = charts("curves", rates((1,) * 9), rates((*(1,) * 8, 2)))
    assert "learning rate of the first 8 of 9 parameter groups" in found


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
