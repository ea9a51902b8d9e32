"""A column tells how it was rounded only by what rounding leaves behind; a number in full is not widened."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.trace.digits import Digits, Precision


def precision(*texts, single=False):
    digits = Digits()
    for text in texts:
        digits.add(text)
    return digits.precision(single)


NUMBERS = st.lists(st.floats(-1e4, 1e4), min_size=20, max_size=40, unique=True)


@given(NUMBERS, st.integers(2, 6), st.sampled_from(["round", "fixed"]))
def test_decimals_are_told_and_cover_every_number_that_rounds_to_what_was_written(numbers, decimals, how):
    texts = [repr(round(x, decimals)) if how == "round" else f"{x:.{decimals}f}" for x in numbers]
    found = precision(*texts)
    if found is not None and found.decimals == decimals:
        assert all(abs(float(text) - x) <= found.slack(float(text)) for text, x in zip(texts, numbers, strict=True))
        assert all(found.slack(float(text)) <= 0.5001 * 10.0**-decimals + math.ulp(1e4) for text in texts)


def test_decimals_are_found_where_numbers_use_them():
    assert precision("2.3456", "0.1234", "11.3", "0.5001") == Precision(decimals=4)
    assert precision("0.5000", "0.5000") == Precision(decimals=4)
    assert precision("0.0000") == Precision(decimals=4)


@given(st.lists(st.floats(1e-7, 1e-2), min_size=20, max_size=40, unique=True), st.integers(3, 6))
def test_significant_digits_are_told_and_cover_every_number(numbers, significant):
    texts = [f"{x:.{significant - 1}e}" for x in numbers]
    found = precision(*texts, "1.0000000e-07"[: significant + 1] + "e-07", "3.3333333e-03"[: significant + 1] + "e-03")
    assert found is not None
    if found.significant == significant:
        assert all(abs(float(text) - x) <= found.slack(float(text)) for text, x in zip(texts, numbers, strict=True))


def test_significant_digits_are_told_from_decimals_by_what_more_of_the_numbers_use():
    assert precision("1.234e-05", "5.678e-03", "9.111e-04") == Precision(significant=4)
    assert precision("12.3456", "0.0123", "7.1234") == Precision(decimals=4)


@given(st.lists(st.integers(-(10**6), 10**6).map(lambda n: n + 1 / 7), min_size=1))
def test_a_double_in_full_is_not_widened_and_one_is_enough(numbers):
    assert precision(*map(repr, numbers), "0.5", "0.25") is None


@pytest.mark.parametrize(
    "texts",
    [
        ["0.001"],
        ["0.001", "0.001"],
        ["1e-05"],
        ["0.1", "0.20003"],
        ["0", "0.0", "0.0"],
        ["3", "4", "5.0"],
        ["nan", "inf"],
        ["1e-9999999999999999999"],
        [],
    ],
)
def test_nice_numbers_alone_are_no_sign_of_rounding(texts):
    assert precision(*texts) is None


def test_single_precision_leaves_open_half_of_its_last_bit_and_few_digits_beside_it():
    whole = precision("0.34567812", "0.5", single=True)
    assert whole == Precision(single=True)
    assert whole.slack(1.0) == pytest.approx(2.0**-24, rel=1e-6)
    assert precision("2.3456", "0.1234", single=True) == Precision(decimals=4, single=True)


@given(st.floats(-1e30, 1e30))
def test_the_slack_of_single_precision_holds_the_double_it_came_from(value):
    single = struct.unpack("<f", struct.pack("<f", value))[0]
    assert abs(single - value) <= Precision(single=True).slack(single)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_slack(value):
    assert Precision(decimals=2, single=True).slack(value) == 0.0


@pytest.mark.parametrize(
    ("one", "value", "other", "another", "alike"),
    [
        (Precision(decimals=4), 0.5, Precision(decimals=4), 7.25, True),
        (Precision(decimals=4), 0.5, Precision(decimals=3), 0.5, False),
        (Precision(significant=1), 9e-5, Precision(significant=1), 1e-4, True),
        (Precision(significant=1), 9e-5, Precision(decimals=5), 1e-4, True),
        (Precision(significant=1), 1e-4, Precision(decimals=5), 9e-5, False),
        (Precision(decimals=4), 0.5, Precision(decimals=4, single=True), 0.5, True),
        (Precision(single=True), 0.5, Precision(single=True), 0.5, False),
        (Precision(significant=1), 0.0, Precision(significant=2), 0.0, False),
        (Precision(significant=3), math.nan, Precision(decimals=2), math.inf, False),
    ],
)
def test_numbers_lie_on_one_grid_where_they_were_rounded_to_the_same_places(one, value, other, another, alike):
    assert one.one_grid(value, other, another) is other.one_grid(another, one, value) is alike


def test_a_precision_reads_as_words():
    assert str(Precision(decimals=4)) == "4 decimals"
    assert str(Precision(significant=3, single=True)) == "3 significant digits and single precision"
