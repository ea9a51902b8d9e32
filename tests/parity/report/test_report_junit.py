"""JUnit XML that parsers read: every comparison is a case, what differs fails, what was left out is skipped."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

from ds_parity._version import __version__
from ds_parity.parity.report.junit import render
from ds_parity.parity.verification.verify import LeftOut
from tests.parity.report.reported import REASSOCIATED, compared, contents, trace

GOOD = compared(trace(), trace(), against="deepspeed")
BAD = compared(trace(4), trace(4, {3: {"loss": 0.75}}))


def suite(*comparisons, **others):
    root = ET.fromstring(render(contents(*comparisons, **others)))
    assert root.tag == "testsuites"
    (found,) = root
    assert found.tag == "testsuite"
    return found


def counted(found):
    return {name: int(found.get(name)) for name in ("tests", "failures", "errors", "skipped")}


def test_a_comparison_that_is_equal_passes_under_its_scenario_and_reference():
    found = suite(GOOD)
    (case,) = found.findall("testcase")
    assert (case.get("classname"), case.get("name")) == ("ragged", "deepspeed")
    assert [child.tag for child in case] == ["system-out"]
    assert "equal: 4 steps; every compared field bit for bit" in case.findtext("system-out")
    assert counted(found) == {"tests": 1, "failures": 0, "errors": 0, "skipped": 0}


def test_one_that_differs_fails_with_the_first_difference_and_the_verdict():
    found = suite(GOOD, BAD)
    good, bad = found.findall("testcase")
    assert good.find("failure") is None
    failure = bad.find("failure")
    assert failure.get("message") == (
        "step 3, loss: candidate 0.75, reference 0.5 (difference 0.5, bound 0): loss must be equal bit for bit"
    )
    assert failure.text.startswith("differs: 1 difference in 4 steps (exact tier); the first: step 3, loss")
    assert counted(found) == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}


def test_many_differences_are_cut_short_and_counted():
    many = compared(trace(100), trace(100, {step: {"loss": 0.75} for step in range(1, 101)}))
    text = suite(many).find("testcase/failure").text
    assert text.splitlines()[-1] == "and 80 more"
    assert len([line for line in text.splitlines() if line.startswith("step ")]) == 20
    assert "and " not in suite(BAD).find("testcase/failure").text.splitlines()[-1]


def test_what_was_left_out_is_skipped_with_its_reason():
    found = suite(GOOD, left_out=(LeftOut("uniform", "deepspeed", "12 passes on 5 ranks"),))
    case = found.findall("testcase")[1]
    assert (case.get("classname"), case.get("name")) == ("uniform", "deepspeed")
    assert case.find("skipped").get("message") == "12 passes on 5 ranks"
    assert counted(found) == {"tests": 2, "failures": 0, "errors": 0, "skipped": 1}


def test_nothing_compared_fails():
    found = ET.fromstring(render(replace(contents(), compared=())))[0]
    assert found.find("testcase/failure").get("message") == "nothing was compared"
    assert counted(found) == {"tests": 1, "failures": 1, "errors": 0, "skipped": 0}


def test_properties_name_the_versions_and_where_it_ran():
    found = {one.get("name"): one.get("value") for one in suite(GOOD, facts={"ran on": "cpu"}).iter("property")}
    assert found == {
        "ds-parity": __version__, "scenario": "ragged", "device": "cpu gloo", "ranks": "2", "seed": "17",
        "deepspeed": "0.19.8", "torch": "2.13.0", "ran on": "cpu",
    }  # fmt: skip


def test_parsers_find_the_order_and_the_attributes_that_they_ask_for():
    found = suite(GOOD, BAD)
    assert [child.tag for child in found] == ["properties", "testcase", "testcase"]
    assert (found.get("name"), found.get("timestamp")) == ("ds-parity", "2031-05-06T07:08:00")
    assert all(float(one.get("time")) == 0 for one in (found, *found.findall("testcase")))


def test_what_xml_cannot_write_is_spelt_out():
    name = "a\x00b\x1b[1mc\ud800d\ufffee\U0001f600\tf"
    odd = replace(compared(trace(), trace(4, {2: {"metrics": {name[:5]: 1.0}}}), against=name), scenario=name)
    found = suite(odd, facts={name: name}, left_out=(LeftOut(name, name, name),))
    for case in found.findall("testcase"):
        assert case.get("name") == "a\\x00b\\x1b[1mc\\ud800d\\ufffee\U0001f600\tf"
    assert "metrics.a\\x00b\\x1b[" in found.find("testcase/failure").text


def test_markup_in_a_name_is_text():
    evil = '<failure message="x">&]]>'
    found = suite(replace(GOOD, scenario=evil, against=evil))
    (case,) = found.findall("testcase")
    assert case.get("classname") == case.get("name") == evil
    assert case.find("failure") is None


def test_nan_and_bounds_are_in_the_text():
    found = suite(compared(trace(), trace(4, {1: {"loss": math.nan}}), REASSOCIATED))
    assert "candidate nan" in found.find("testcase/failure").get("message")


def test_the_same_traces_give_the_same_file():
    assert render(contents(GOOD, BAD)) == render(contents(GOOD, BAD))
    assert render(contents(GOOD)).startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>')
