"""The comparison fails whatever isn't shown to be equal: NaN, absent values, missing steps, an ulp where bits count."""

import math
import statistics
import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_parity.errors import ConfigError
from ds_parity.parity.comparison import blocks
from ds_parity.parity.comparison.bounds import (
    EPS,
    LEAST_LOSS,
    LEAST_METRIC,
    LEAST_REWARD,
    Bound,
    C,
    Tier,
    greatest,
    has_nan,
)
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.comparison.fields import BOUNDED
from ds_parity.trace import Trace
from ds_parity.trace.columns import SIZE
from tests.parity.comparison.comparing import HEADER, on_disk, record, trace, two_traces, weights

EXACT, REASSOCIATED = Tier.EXACT, Tier.REASSOCIATED
BOTH = pytest.mark.parametrize("tier", [EXACT, REASSOCIATED])


def changed(**changes):
    """A trace of three steps with changes in the second."""
    return trace(record(1), record(2, **changes), record(3))


def fields(comparison):
    return [(difference.step, difference.field) for difference in comparison.differences]


@BOTH
def test_a_trace_equals_itself(tier):
    comparison = compare(trace(), trace(), tier)
    assert comparison.equal
    assert comparison.first is None
    assert comparison.notes == (
        () if tier is EXACT else ("loss_scale is not compared: that is left to the exact tier",)
    )


ONE_ULP = {
    "total": math.nextafter(4.0, 5),
    "loss": math.nextafter(0.5, 1),
    "lr": (1e-3, math.nextafter(1e-4, 1)),
    "grad_norm": math.nextafter(2.0, 3),
    "loss_scale": math.nextafter(1024.0, 0),
    "metrics": {"reward": math.nextafter(0.25, 1)},
    "weights": weights(digit="b"),
}


@pytest.mark.parametrize("name", ONE_ULP)
def test_one_ulp_fails_the_exact_tier(name):
    comparison = compare(trace(), changed(**{name: ONE_ULP[name]}), EXACT)
    assert fields(comparison) == [(2, "metrics.reward" if name == "metrics" else name)]
    assert comparison.first.bound == 0.0
    assert "bit for bit" in comparison.first.why


@pytest.mark.parametrize("name", ["lr", "total"])
def test_one_ulp_of_lr_or_total_fails_the_reassociated_tier_too(name):
    assert fields(compare(trace(), changed(**{name: ONE_ULP[name]}), REASSOCIATED)) == [(2, name)]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "weights"])
def test_one_ulp_of_a_sum_passes_the_reassociated_tier(name):
    assert compare(trace(), changed(**{name: ONE_ULP[name]}), REASSOCIATED).equal


@pytest.mark.parametrize("name", ["passes", "idle_passes", "rollouts", "prompts", "tokens"])
@BOTH
def test_a_count_that_is_off_by_one_fails(tier, name):
    off = getattr(record(), name) + 1
    comparison = compare(trace(), changed(**{name: off}), tier)
    assert fields(comparison) == [(2, name)]
    assert comparison.first.difference == 1.0


@BOTH
def test_a_step_that_one_engine_skipped_fails(tier):
    assert fields(compare(trace(), changed(skipped=True), tier)) == [(2, "skipped")]


@BOTH
def test_another_number_of_parameter_groups_fails(tier):
    assert fields(compare(trace(), changed(lr=(1e-3,)), tier)) == [(2, "lr")]


def test_minus_zero_is_not_zero_in_the_exact_tier():
    assert not compare(changed(loss=0.0), changed(loss=-0.0), EXACT).equal


NAN = {
    "loss": math.nan,
    "grad_norm": math.nan,
    "lr": (1e-3, math.nan),
    "total": math.nan,
    "weights": weights(norm=math.nan),
}


@pytest.mark.parametrize("name", NAN)
@pytest.mark.parametrize("sides", ["reference", "candidate", "both"])
@BOTH
def test_nan_fails_in_either_trace_and_in_both(tier, sides, name):
    bad = changed(**{name: NAN[name]})
    comparison = compare(trace() if sides == "candidate" else bad, trace() if sides == "reference" else bad, tier)
    assert (comparison.first.step, comparison.first.field) == (2, name)
    assert "NaN" in comparison.first.why


def test_nan_in_a_metric_or_the_loss_scale_fails_the_exact_tier():
    bad = changed(metrics={"reward": math.nan}, loss_scale=math.nan)
    assert fields(compare(bad, bad, EXACT)) == [(2, "loss_scale"), (2, "metrics.reward")]


@BOTH
def test_nan_in_the_sketch_fails(tier):
    bad = changed(weights=weights(sketch=(math.nan, 1.0)))
    assert fields(compare(bad, bad, tier)) == [(2, "weights")]


@BOTH
def test_infinity_equals_itself_and_nothing_else(tier):
    infinite = changed(loss=math.inf)
    assert compare(infinite, infinite, tier).equal
    for other in (changed(loss=-math.inf), trace()):
        assert not compare(infinite, other, tier).equal
        assert not compare(other, infinite, tier).equal


def test_a_difference_that_itself_is_nan_fails_in_its_step_and_in_the_mean():
    infinite = compare(trace(record(1, grad_norm=math.inf)), trace(record(1)), REASSOCIATED)
    assert fields(infinite) == [(1, "grad_norm")]
    assert math.isnan(infinite.first.difference)
    steps = compare(changed(grad_norm=math.inf), trace(), REASSOCIATED)
    assert fields(steps) == [(2, "grad_norm"), (None, "grad_norm, mean")]


@pytest.mark.parametrize("sides", ["reference", "candidate", "both"])
@BOTH
def test_a_trace_without_steps_fails_even_against_another(tier, sides):
    empty = Trace(HEADER, ())
    comparison = compare(trace() if sides == "candidate" else empty, trace() if sides == "reference" else empty, tier)
    assert not comparison.equal
    assert "has no steps" in comparison.first.why


@pytest.mark.parametrize("lost", [1, 2, 3])
@BOTH
def test_a_step_that_one_trace_lacks_fails(tier, lost):
    short = trace(*(record(step) for step in (1, 2, 3) if step != lost))
    missing = compare(trace(), short, tier)
    assert fields(missing) == [(lost, "step")]
    assert missing.first.why == f"step {lost} is in the reference only"
    assert [row.candidate is None for row in missing.rows] == [step == lost for step in (1, 2, 3)]
    assert compare(short, trace(), tier).first.why == f"step {lost} is in the candidate only"


@BOTH
def test_a_doubled_step_fails(tier):
    doubled = trace(record(1), record(2), record(2), record(3))
    assert "2 times" in compare(trace(), doubled, tier).first.why
    assert not compare(doubled, doubled, tier).equal


@pytest.mark.parametrize("name", ["loss", "grad_norm", "weights"])
@BOTH
def test_a_field_that_only_one_trace_has_fails(tier, name):
    comparison = compare(trace(), changed(**{name: None}), tier)
    assert (2, name) in fields(comparison)
    assert comparison.first.why == f"{name} is in the reference only"
    assert not compare(changed(**{name: None}), trace(), tier).equal


def test_a_metric_that_only_one_trace_has_fails_the_exact_tier():
    assert fields(compare(trace(), changed(metrics={}), EXACT)) == [(2, "metrics.reward")]
    assert fields(compare(trace(), changed(metrics={"reward": 0.25, "kl": 0.0}), EXACT)) == [(2, "metrics.kl")]


def test_a_sketch_that_only_one_trace_has_fails_the_reassociated_tier():
    bare = weights(sketch=())
    for other in (changed(weights=bare), trace(*(record(step, weights=bare) for step in (1, 2, 3)))):
        assert "sketches of 2 and 0" in compare(trace(), other, REASSOCIATED).first.why


def test_what_neither_trace_has_is_named_and_not_compared():
    bare = trace(record(1, loss=None, grad_norm=None, loss_scale=None, weights=None, metrics={}))
    comparison = compare(bare, bare, EXACT)
    assert comparison.equal
    assert comparison.not_compared == ("loss", "grad_norm", "loss_scale", "weights", "metrics")
    assert compare(trace(), trace(), EXACT).not_compared == ()
    assert compare(trace(), trace(), REASSOCIATED).not_compared == ("loss_scale",)


@pytest.mark.parametrize("header", [{"ranks": 4}, {"engine": "torch"}])
@BOTH
def test_passes_are_left_out_where_the_ranks_decide_them_and_nothing_else_is(tier, header):
    other = trace(*(record(step, passes=9, idle_passes=0) for step in (1, 2, 3)), **header)
    for comparison in (compare(trace(), other, tier), compare(other, trace(), tier)):
        assert comparison.equal
        assert {"passes", "idle_passes"} <= set(comparison.not_compared)
        told = [note for note in comparison.notes if "passes" in note]
        assert len(told) == 1
        assert told[0].startswith("passes and idle_passes are not compared: the ranks decide them (")
    rollouts = trace(record(1), record(2, rollouts=5), record(3), **header)
    assert fields(compare(trace(), rollouts, tier)) == [(2, "rollouts")]


def test_two_traces_of_torch_have_the_same_passes():
    """Both are one rank, so that the ranks don't tell them apart."""
    one, other = (
        trace(*(record(step, passes=passes) for step in (1, 2)), engine="torch", ranks=1) for passes in (1, 9)
    )
    assert fields(compare(one, other, EXACT)) == [(1, "passes"), (2, "passes")]


def test_headers_that_differ_are_said_first():
    other = trace(config_hash="cd", seed=2, ranks=4)
    notes = compare(trace(), other, EXACT).notes
    assert [note.split(":")[0] for note in notes[:3]] == [
        f"the headers differ in {name}" for name in ("config_hash", "seed", "ranks")
    ]
    assert "'ab'" in notes[0]
    assert "'cd'" in notes[0]


@BOTH
def test_that_torch_has_one_rank_is_no_news(tier):
    for header in ({"engine": "torch", "ranks": 1}, {"engine": "torch", "ranks": 1, "seed": 2}):
        told = [note for note in compare(trace(**header), trace(), tier).notes if note.startswith("the headers")]
        assert [note.split(":")[0] for note in told] == ["the headers differ in seed"] * ("seed" in header)
    assert any("differ in ranks" in note for note in compare(trace(ranks=1), trace(), tier).notes)


def test_what_a_rule_leaves_out_is_noted_only_if_a_trace_has_it():
    bare, full = trace(record(1, loss_scale=None)), trace(record(1))
    assert compare(bare, bare, REASSOCIATED).notes == ()
    assert compare(bare, full, REASSOCIATED).notes == ("loss_scale is not compared: that is left to the exact tier",)
    assert compare(bare, full, REASSOCIATED).not_compared == ("loss_scale",)


def test_a_metric_is_bounded_like_a_loss_over_no_less_than_its_greatest():
    bound = C["fp32"]["loss"] * EPS["fp32"] * math.sqrt(8) * 0.25
    within, beyond = (changed(metrics={"reward": 0.25 + factor * bound}) for factor in (0.9, 1.1))
    assert compare(trace(), within, REASSOCIATED).equal
    assert fields(compare(trace(), beyond, REASSOCIATED)) == [(2, "metrics.reward")]
    assert fields(compare(trace(), changed(metrics={}), REASSOCIATED)) == [(2, "metrics.reward")]
    assert fields(compare(trace(), changed(metrics={"reward": math.nan}), REASSOCIATED)) == [(2, "metrics.reward")]


@pytest.mark.parametrize("as_files", [False, True])
def test_a_metric_near_0_is_as_exact_as_the_terms_that_cancel_in_it(as_files, tmp_path):
    """A KL of 1e-5 is a mean of exp(d) - d - 1, whose terms are of the order 1."""
    bound = C["fp32"]["loss"] * EPS["fp32"] * math.sqrt(4) * LEAST_METRIC["fp32"]

    def compared(name, off):
        pair = [trace(record(1, metrics={name: value})) for value in (1e-5, 1e-5 + off * bound)]
        if as_files:
            pair = [on_disk(tmp_path / f"{side}.jsonl", it) for side, it in zip("ab", pair, strict=True)]
        return compare(*pair, REASSOCIATED)

    assert compared("kl", 0.9).equal
    assert fields(compared("kl", 1.1)) == [(1, "metrics.kl")]
    for rate in (
        "lr",
        "train/lr",
        "opt.lr",
        "base_lr",
        "learning_rate",
        "learning_rate_0",
        "lr0",
        "LR-a",
        "actorLr",
        "Learning Rate",
    ):
        assert fields(compared(rate, 0.9)) == [(1, f"metrics.{rate}")]
    assert compared("slr", 0.9).equal
    assert compared("actor/pg_loss", 0.9 * LEAST_LOSS / LEAST_METRIC["fp32"]).equal, "it is as exact as a loss"
    assert fields(compared("PG_Loss", 1.1 * LEAST_LOSS / LEAST_METRIC["fp32"])) == [(1, "metrics.PG_Loss")]
    for kl in ("actor/kl_loss", "klLoss", "approx_kl_loss", "kldiv_loss"):
        assert compared(kl, 0.9).equal
        assert fields(compared(kl, 1.1)) == [(1, f"metrics.{kl}")], "a KL is not as exact as a loss"
    assert compared("loss_with_kl", 0.9 * LEAST_LOSS / LEAST_METRIC["fp32"]).equal
    times = LEAST_REWARD["fp32"] / LEAST_METRIC["fp32"]
    for reward in ("rewards/margins", "train/rewards/chosen", "eval_rewards/rejected", "dpo/margin"):
        assert compared(reward, 0.9 * times).equal
        assert fields(compared(reward, 1.1 * times)) == [(1, f"metrics.{reward}")]


@pytest.mark.parametrize(("dtype", "norm", "times"), [("fp32", 0.002, 25), ("fp64", 1e-6, 30), ("bf16", 0.002, 1)])
@pytest.mark.parametrize("as_files", [False, True])
def test_a_small_norm_is_compared_relative_to_a_greater_one_in_long_types(tmp_path, as_files, dtype, norm, times):
    def compared(part):
        off = part * times * Bound(C[dtype]["grad_norm"], EPS[dtype], 4).relative
        pair = [trace(record(1, grad_norm=norm)), trace(record(1, grad_norm=norm * (1 + off)))]
        if as_files:
            pair = [on_disk(tmp_path / f"{side}.jsonl", it) for side, it in zip("ab", pair, strict=True)]
        return compare(*pair, REASSOCIATED, dtype)

    assert compared(0.9).equal
    assert fields(compared(1.1)) == [(1, "grad_norm")]


def test_a_metric_that_is_small_beside_its_bound_is_told_of():
    one = trace(record(1, metrics={"kl": 3e-4, "reward": 1.0, "none": 0.0}))
    said = [note for note in compare(one, one, REASSOCIATED, "bf16").notes if "metrics may differ" in note]
    assert len(said) == 1
    assert said[0].endswith("within their bounds: kl (at most 0.0003, by 0.00027)")
    assert not [note for note in compare(one, one, REASSOCIATED).notes if "metrics may differ" in note]


def test_a_metric_that_is_0_in_the_reference_alone_is_told_of():
    none, some = (trace(record(1, metrics={"clip_frac": value})) for value in (0.0, 2e-4))
    compared = compare(none, some, REASSOCIATED, "bf16")
    assert compared.equal
    assert [note for note in compared.notes if note.endswith("bounds: clip_frac (at most 0.0002, by 0.00027)")]


def test_every_bounded_field_has_a_constant_for_every_dtype_and_a_short_type_none_that_is_greater():
    assert C.keys() == EPS.keys()
    assert all(tuple(C[dtype]) == BOUNDED for dtype in C)
    assert C["fp64"] == C["fp32"]
    assert C["fp16"] == C["bf16"]
    assert all(0 < C["bf16"][name] < C["fp32"][name] for name in BOUNDED)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("side", [1, -1])
def test_just_within_the_bound_passes_and_just_over_fails(dtype, name, side):
    bound = Bound(C[dtype][name], EPS[dtype], 4).relative
    one = trace(record(1, **{name: 2.0}))
    for factor, equal in ((0.8, True), (1.3, False)):  # in fp64 the bound is four steps of the last bit
        other = trace(record(1, **{name: 2.0 * (1 + side * factor * bound)}))
        assert compare(one, other, REASSOCIATED, dtype).equal is equal


def test_the_bound_grows_with_the_rollouts_summed_so_far():
    off = 2.0 * (1 + 0.9 * Bound(C["fp32"]["grad_norm"], EPS["fp32"], 12).relative)
    assert compare(trace(), trace(record(1), record(2), record(3, grad_norm=off)), REASSOCIATED).equal
    assert not compare(trace(), trace(record(1, grad_norm=off), record(2), record(3)), REASSOCIATED).equal


def test_neither_tokens_nor_the_candidates_own_rollouts_widen_the_bound():
    off = 2.0 * (1 + 1.1 * Bound(C["fp32"]["grad_norm"], EPS["fp32"], 4).relative)
    long = compare(trace(record(1, tokens=10**6)), trace(record(1, tokens=10**6, grad_norm=off)), REASSOCIATED)
    assert fields(long) == [(1, "grad_norm")]
    assert "sqrt(4 rollouts)" in long.first.why
    many = compare(trace(record(1)), trace(record(1, rollouts=10**6, grad_norm=off)), REASSOCIATED)
    assert fields(many) == [(1, "rollouts"), (1, "grad_norm")]


def test_a_loss_near_zero_is_measured_on_the_scale_of_the_trace():
    reference = trace(record(1, loss=1.0), record(2, loss=1e-9))
    assert compare(reference, trace(record(1, loss=1.0), record(2, loss=2e-9)), REASSOCIATED).equal
    assert not compare(reference, trace(record(1, loss=1.0), record(2, loss=1e-3)), REASSOCIATED).equal


def test_an_infinite_loss_does_not_widen_the_scale_of_the_others():
    reference = trace(record(1, loss=math.inf), record(2, loss=1.0))
    assert fields(compare(reference, trace(record(1, loss=math.inf), record(2, loss=2.0)), REASSOCIATED))[0] == (
        2,
        "loss",
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_are_measured_by_sketch_over_norm(dtype):
    bound = Bound(C[dtype]["weights"], EPS[dtype], 4).relative
    one = trace(record(1))
    for factor, equal in ((0.99, True), (1.01, False)):
        moved = 3.0 + factor * bound * 10.0 * math.sqrt(2)
        other = trace(record(1, weights=weights(sketch=(moved, -4.0), digit="b")))
        assert compare(one, other, REASSOCIATED, dtype).equal is equal


def test_weights_that_moved_without_changing_their_norm_fail_by_sketch():
    assert fields(compare(trace(), changed(weights=weights(sketch=(4.0, -3.0), digit="b")), REASSOCIATED)) == [
        (2, "weights")
    ]


@pytest.mark.parametrize("sketch", [(), (3.0, -4.0)])
def test_norms_that_differ_fail_with_and_without_a_sketch(sketch):
    one = trace(record(1, weights=weights(sketch=sketch)))
    other = trace(record(1, weights=weights(norm=10.1, sketch=sketch, digit="b")))
    assert fields(compare(one, other, REASSOCIATED)) == [(1, "weights")]


def test_a_small_bias_that_every_step_hides_is_caught_by_the_mean_signed_difference():
    def run(sign):
        steps = []
        for step in range(1, 26):
            bound = Bound(C["fp32"]["grad_norm"], EPS["fp32"], 4 * step).relative
            steps.append(record(step, grad_norm=2.0 * (1 + sign(step) * 0.5 * bound)))
        return trace(*steps)

    reference = run(lambda step: 0)
    assert compare(reference, run(lambda step: (-1) ** step), REASSOCIATED).equal
    biased = compare(reference, run(lambda step: 1), REASSOCIATED)
    assert fields(biased) == [(None, "grad_norm, mean")]
    assert not biased.first.difference <= biased.first.bound


@pytest.mark.parametrize("norm", [1e308, 5e-324, 1.7976931348623157e308])
def test_the_greatest_and_the_least_numbers_are_compared_without_a_warning(norm):
    steps = [record(step, grad_norm=norm, loss=norm * (-1) ** step) for step in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comparison = compare(trace(*steps), trace(*steps), REASSOCIATED)
    assert comparison.equal


def test_a_bound_too_wide_to_prove_anything_is_said():
    wide = trace(record(1, rollouts=1_000_000))
    assert any("proves little" in note for note in compare(wide, wide, REASSOCIATED, "bf16").notes)
    assert not any("proves little" in note for note in compare(wide, wide, REASSOCIATED, "fp32").notes)


def test_measured_is_each_bounded_field_where_it_comes_nearest_to_its_bound():
    # At step 1 the loss is off by 2e-7 of a bound half as wide as that of step 4, where it is off by 3e-7.
    steps = [record(step) for step in (2, 3)]
    reference = trace(record(1, loss=1.0), *steps, record(4, loss=1.0))
    other = trace(record(1, loss=1.0 + 2e-7), *steps, record(4, loss=1.0 + 3e-7, weights=None))
    loss, grad_norm, held = compare(reference, other, REASSOCIATED).measured
    assert (loss.field, loss.step) == ("loss", 1)
    assert (loss.difference, loss.bound) == pytest.approx((2e-7, C["fp32"]["loss"] * 2.0**-23 * 2), rel=1e-6)
    assert (grad_norm.field, grad_norm.step, grad_norm.difference) == ("grad_norm", 1, 0.0)
    assert (held.field, held.difference) == ("weights", 0.0)
    assert compare(reference, other, EXACT).measured == ()


def test_measured_does_not_lose_nan_and_leaves_out_what_no_step_has():
    bad = changed(loss=math.nan, weights=None)
    loss, *_ = compare(bad, bad, REASSOCIATED).measured
    assert loss.step == 2
    assert math.isnan(loss.difference)
    none = trace(record(1, weights=None))
    assert [it.field for it in compare(none, none, REASSOCIATED).measured] == ["loss", "grad_norm"]


def test_rows_hold_the_relative_difference_of_each_quantity():
    comparison = compare(trace(), changed(loss=0.6, grad_norm=3.0, lr=(1e-3, 2e-4)), EXACT)
    row = comparison.rows[1]
    assert (row.loss, row.grad_norm, row.lr, row.weights) == pytest.approx((0.2, 0.5, 1.0, 0.0))
    assert comparison.rows[0].differences == ()
    assert [difference.field for difference in row.differences] == ["lr", "loss", "grad_norm"]


def test_a_dtype_without_a_bound_is_refused():
    with pytest.raises(ConfigError, match=r"'fp8'.*fp64, fp32, bf16, fp16"):
        compare(trace(), trace(), REASSOCIATED, "fp8")


def test_a_difference_from_zero_is_infinite_and_nan_is_never_lost():
    assert math.isnan(greatest([1.0, math.nan, 2.0]))
    assert has_nan((1.0, (math.nan,)))
    for norm in (0.0, math.inf):
        one, other = (changed(weights=weights(norm=norm, sketch=(3.0, last))) for last in (-4.0, -4.1))
        assert compare(one, other, REASSOCIATED).first.difference == math.inf
    tiny = changed(grad_norm=1e-300)
    zero = trace(*(record(step, grad_norm=0.0) for step in (1, 2, 3)))
    assert compare(zero, tiny, REASSOCIATED).first.difference == math.inf


def same(a, b):
    return (
        a is b is None
        or (not isinstance(a, float) and a == b)
        or (isinstance(a, float) and isinstance(b, float) and a == b and math.copysign(1, a) == math.copysign(1, b))
    )


def within(name, a, b, terms, floor):
    if a is None or b is None:
        return a is b
    limit = C["fp32"][name] * EPS["fp32"] * math.sqrt(max(terms, 1)) * max(abs(a), floor)
    return a == b or (math.isfinite(a) and abs(a - b) <= limit)


def clean(item):
    return not any(math.isnan(value) for value in (item.norm, *item.sketch))


def near_weights(a, b, terms):
    if a is None or b is None:
        return a is b
    if not clean(a) or not clean(b) or len(a.sketch) != len(b.sketch):
        return False
    if not all(math.isfinite(value) for value in (a.norm, *a.sketch, *b.sketch)):
        return a.norm == b.norm and a.sketch == b.sketch
    distance = math.dist(a.sketch, b.sketch) / math.sqrt(max(len(a.sketch), 1))
    limit = C["fp32"]["weights"] * EPS["fp32"] * math.sqrt(max(terms, 1)) * abs(a.norm)
    return abs(a.norm - b.norm) <= limit and distance <= limit


def step_within_bounds(a, b, tier, *, same_ranks, terms, scales):
    names = ["rollouts", "prompts", "tokens", "total", "skipped", *(["passes", "idle_passes"] if same_ranks else [])]
    good = all(same(getattr(a, name), getattr(b, name)) for name in names)
    good &= len(a.lr) == len(b.lr) and all(same(x, y) for x, y in zip(a.lr, b.lr, strict=False))
    if tier is REASSOCIATED:
        figures = ("loss", "grad_norm")
        near = all(within(name, getattr(a, name), getattr(b, name), terms, scales[name]) for name in figures)
        told = a.metrics.keys() == b.metrics.keys()
        told &= all(within("loss", a.metrics[k], b.metrics.get(k), terms, scales[k]) for k in a.metrics)
        return good and near and told and near_weights(a.weights, b.weights, terms)
    good &= all(same(getattr(a, name), getattr(b, name)) for name in ("loss", "grad_norm", "loss_scale"))
    good &= a.metrics.keys() == b.metrics.keys() and all(same(a.metrics[name], b.metrics[name]) for name in a.metrics)
    if a.weights is None or b.weights is None:
        return good and a.weights is b.weights
    return good and a.weights.checksum == b.weights.checksum and clean(a.weights) and clean(b.weights)


def all_within_bounds(reference, candidate, tier):
    if not reference.steps or [r.step for r in reference.steps] != [r.step for r in candidate.steps]:
        return False
    losses = [abs(r.loss) for r in reference.steps if r.loss is not None and math.isfinite(r.loss)]
    scales = {
        k: max(
            [
                LEAST_METRIC["fp32"],
                *(abs(r.metrics[k]) for r in reference.steps if math.isfinite(r.metrics.get(k, math.inf))),
            ]
        )
        for k in "xy"
    }
    norms = [abs(r.grad_norm) for r in reference.steps if r.grad_norm is not None and math.isfinite(r.grad_norm)]
    scales |= {"loss": max([*losses, LEAST_LOSS]), "grad_norm": statistics.median(norms or [0.0])}
    scales |= {"reward": max([abs(r.metrics.get("reward", 0.0)) for r in reference.steps])}
    same_ranks = reference.header.ranks == candidate.header.ranks
    terms, good = 0, True
    for a, b in zip(reference.steps, candidate.steps, strict=True):
        terms += a.rollouts
        good &= step_within_bounds(a, b, tier, same_ranks=same_ranks, terms=terms, scales=scales)
    return good


@pytest.mark.parametrize("norm", [2.8e-8, 1e-12, 0.0])
def test_a_gradient_that_cancels_is_as_exact_as_what_cancels(norm):
    """Four equal solutions of one prompt: the reference came to 1e-16, another to 2.8e-8, where others are 1.3."""
    sound, ours = (
        trace(*(record(n, grad_norm=it) for n, it in enumerate([1.3, 1.0, last], 1))) for last in (1e-16, norm)
    )
    assert compare(sound, ours, REASSOCIATED).equal
    wrong = trace(*(record(n, grad_norm=it) for n, it in enumerate([1.3, 1.0, 0.01], 1)))
    assert compare(sound, wrong, REASSOCIATED).first.field == "grad_norm"


@BOTH
@settings(max_examples=600, deadline=None)
@given(two_traces(), st.sampled_from([1, 2, SIZE]))
def test_equal_is_said_only_if_every_compared_field_is_within_its_bound_whatever_steps_are_taken_at_once(
    tier, traces, size
):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "SIZE", size)
        comparison = compare(*traces, tier)
    biased = [difference.field for difference in comparison.differences if difference.field.endswith(", mean")]
    within_bounds = all_within_bounds(*traces, tier)
    assert not comparison.equal or within_bounds
    assert comparison.equal or biased or not within_bounds
    if within_bounds:
        assert all(it.difference <= it.bound for it in comparison.measured)


def test_equal_and_first_cannot_contradict_the_differences():
    comparison = compare(trace(), changed(rollouts=5), EXACT)
    assert comparison.first == comparison.differences[0]
    assert not comparison.equal
    assert replace(comparison, differences=()).equal


@BOTH
@pytest.mark.parametrize(("name", "said"), [("loss", "every loss is 0"), ("grad_norm", "every gradient norm is 0")])
def test_a_run_whose_every_loss_or_norm_is_0_proves_little(tier, name, said):
    silent = trace(*(record(step, **{name: 0.0}) for step in (1, 2, 3)))
    comparison = compare(silent, silent, tier)
    assert comparison.equal
    (why,) = comparison.proves_little
    assert why.startswith(f"{said} in both traces")
    skips = trace(record(1, **{name: 0.0}), record(2, **{name: None}), record(3, **{name: 0.0}))
    assert compare(skips, skips, tier).proves_little == (why,)
    assert compare(trace(), trace(), tier).proves_little == ()
    some = trace(record(1, **{name: 0.0}), record(2), record(3, **{name: 0.0}))
    assert compare(some, some, tier).proves_little == ()
