"""What two headers imply of how like their traces should be, and the words for what rounding alone explains."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.comparison.implied import cut_otherwise, implied
from ds_parity.parity.comparison.verdicts import verdict_of, within_rounding
from tests.parity.comparison.comparing import HEADER, record, trace

EXACT, REASSOCIATED = Tier.EXACT, Tier.REASSOCIATED
KNOWN = HEADER.model_copy(update={"stage": 2, "dtype": "bf16", "versions": {"torch": "2.13.0", "ds_parity": "1"}})


def other(**changes):
    return KNOWN.model_copy(update=changes)


def test_one_engine_with_one_setting_is_compared_bit_for_bit():
    assert implied(KNOWN, KNOWN).tier is EXACT
    assert implied(KNOWN, other(seed=2, scenario="other", versions={"torch": "2.13.0", "ds_parity": "2"})).tier is EXACT


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "torch"}, "the engines differ (ds_parity, torch)"),
        ({"engine": "deepspeed-loop", "config_hash": "cd"}, "the engines differ"),
        ({"ranks": 4}, "the ranks differ (2, 4)"),
        ({"stage": 3}, "the ZeRO stage differs (2, 3)"),
        ({"dtype": "fp32"}, "the type differs (bf16, fp32)"),
        ({"config_hash": "cd"}, "the configuration differs,"),
        ({"device": "cuda nccl"}, "the device differs"),
        ({"versions": {"torch": "2.5.0"}}, "the version of torch differs (2.13.0, 2.5.0)"),
        ({"records": ("loss",)}, "a side is another trainer's"),
    ],
)
def test_whatever_may_add_sums_up_in_another_order_is_compared_within_bounds(changes, said):
    found = implied(KNOWN, other(**changes))
    assert found.tier is REASSOCIATED
    assert said in found.because + ","


@pytest.mark.parametrize(
    ("changes", "tier"),
    [({"passes": 3}, REASSOCIATED), ({"passes": 3, "rollouts": 5}, EXACT), ({"loss": 0.5}, EXACT), ({}, EXACT)],
)
def test_windows_that_are_cut_otherwise_have_sums_of_other_parts(changes, tier):
    a, b = trace(record(1), record(2)), trace(record(1), record(2, **changes))
    given = implied(KNOWN, KNOWN)
    found = cut_otherwise(given, compare(a, b, EXACT))
    assert found.tier is tier
    assert (found is given) is (tier is EXACT)
    assert found is given or "another number of passes" in found.because


def test_engines_that_are_to_agree_bit_for_bit_are_compared_so():
    assert implied(other(engine="deepspeed-loop"), KNOWN).tier is EXACT
    assert implied(other(engine="deepspeed"), other(engine="deepspeed-loop")).tier is EXACT


def test_what_has_no_bound_is_no_rounding():
    a, b = (trace(*(record(step, loss_scale=scale) for step in (1, 2))) for scale in (1024.0, 512.0))
    assert words(a, b, EXACT) == "the traces differ"


def test_an_older_header_that_says_neither_stage_nor_type_is_no_other_setting():
    assert implied(other(stage=None, dtype=None), KNOWN).tier is EXACT


@pytest.mark.parametrize(
    ("types", "dtype"), [(("fp32", "fp32"), "fp32"), (("fp32", "bf16"), "bf16"), ((None, "fp16"), "fp16")]
)
def test_the_type_is_the_shorter_one_that_a_header_says(types, dtype):
    assert implied(*(other(dtype=it) for it in types)).dtype == dtype
    assert implied(HEADER, HEADER).dtype == "fp32"


def words(a, b, tier, dtype="fp32"):
    result = compare(a, b, tier, dtype)
    return verdict_of(result, within_rounding(result, lambda: compare(a, b, REASSOCIATED, dtype)))


def losses(*values):
    return trace(*(record(step, loss=value) for step, value in enumerate(values, 1)))


def test_what_is_the_same_is_equal_in_either_tier():
    assert words(losses(0.5), losses(0.5), EXACT) == words(losses(0.5), losses(0.5), REASSOCIATED) == "equal"


def test_a_difference_of_rounding_is_said_to_be_one_whatever_the_tier():
    near = losses(0.5 + 3e-8)
    assert words(losses(0.5), near, REASSOCIATED) == "equal but for rounding"
    assert words(losses(0.5), near, EXACT).startswith("equal but for rounding: every difference is within the")


def test_a_metric_that_is_rounded_otherwise_is_not_the_same():
    near = trace(record(1, metrics={"reward": 0.25 + 2.0**-40}))
    assert words(trace(record(1)), near, REASSOCIATED) == "equal but for rounding"


def test_what_is_more_than_rounding_differs_in_either_tier():
    assert (
        words(losses(0.5), losses(0.6), EXACT) == words(losses(0.5), losses(0.6), REASSOCIATED) == "the traces differ"
    )


def test_one_difference_beyond_rounding_among_many_of_it_is_a_difference():
    assert words(losses(0.5, 0.5, 0.5), losses(0.5 + 3e-8, 0.5, 0.6), EXACT) == "the traces differ"


def test_what_rounding_never_touches_is_no_rounding():
    assert words(trace(record(1)), trace(record(1, lr=(1e-3, 1.0000001e-4))), EXACT) == "the traces differ"
