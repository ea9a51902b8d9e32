"""The diagnosis of faults that no control is, recorded on two ranks: few are named, and rightly."""

import tarfile
from collections import Counter
from pathlib import Path

import pytest

from ds_parity.parity.diagnosis import CLASSES, Fit, grouped
from tests.hard.blind_faults import ALL, half
from tests.hard.blind_faults.judged import RIGHT, fits, judged, shares, table

# Half 0, with which the rules were developed; fp32 on ZeRO 1. Half 1 runs on ranks, in tests/hard/test_blind_faults.py.
RECORDED = Path(__file__).parents[1] / "hard" / "blind_faults" / "half0_fp32_zero1.tar.xz"
NAMES = [name for name in ALL if half(name) == 0]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        # Python knows filters from 3.11.4 on, and Debian 12 has 3.11.2.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return judged(NAMES, folder, "fp32")


def test_every_fault_was_recorded_with_both_references(found):
    assert len(found) == 2 * len(NAMES)


def test_what_is_said_is_right_or_honest(found):
    of_all = shares(found)
    assert of_all["good"] >= 0.95, table(found)
    assert of_all["misleading"] <= 0.02, table(found)


def test_a_third_of_them_is_named(found):
    counts = Counter(one.verdict for one in found)
    assert counts["right"] >= 0.3 * len(found), table(found)


def test_unknown_leaves_half_of_the_classes_open_at_most_as_a_rule(found):
    unknown = [len(one.diagnosis.classes) for one in found if not one.diagnosis.causes and one.diagnosis.classes]
    assert sum(count <= len(CLASSES) / 2 for count in unknown) >= 0.9 * len(unknown)
    assert all(one.diagnosis.next for one in found if one.diagnosis.classes and not one.diagnosis.causes)


def test_a_likelihood_is_no_more_than_what_these_faults_show(found):
    """Each kind of fit was right at least as often as its likelihood says."""
    for name, (right, named) in fits(found).items():
        assert right / named >= Fit[name].likelihood, (name, right, named)
        assert Fit[name].named >= named, "the numbers beside the fits are of more records than these"


def test_what_the_loop_without_a_fault_tells_the_torch_reference_tells_too_and_more(found):
    """The one on the same ranks, and the other one process of fp64, which computes what known faults would make."""
    named = {"clean": {}, "torch": {}}
    for one in found:
        first = grouped(one.diagnosis.causes)[:1]
        named[one.reference][one.name] = {cause.name for group in first for cause in group}
    assert not {name for name, causes in named["clean"].items() if not causes <= named["torch"][name]}
    more = {name for name, causes in named["torch"].items() if causes - named["clean"][name]}
    assert len(more) > 3
    assert all(one.verdict == "right" for one in found if one.name in more and one.reference == "torch")


def test_what_counts_as_right_are_faults_of_this_half_alone():
    assert set(RIGHT) <= set(NAMES)
