"""What people read: the table shows what failed and where, the verdict names the first difference with its numbers."""

import math
from io import StringIO

from rich.console import Console

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.report.terminal import render, verdict
from ds_parity.trace import Header, StepRecord, Trace, Weights

HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="ab", engine="ds_parity")


def trace(*changes, **header):
    steps = []
    for step, change in enumerate(changes, 1):
        counts = {"step": step, "passes": 7, "idle_passes": 0, "rollouts": 64, "prompts": 8, "tokens": 100}
        figures = {"total": 64.0, "loss": 0.5, "lr": (1e-3,), "grad_norm": 2.0}
        steps.append(StepRecord(**counts | figures | change))
    return Trace(HEADER.model_copy(update=header), tuple(steps))


def lines(comparison):
    console = Console(width=140, record=True, file=StringIO())
    console.print(render(comparison))
    return [line for line in console.export_text().splitlines() if line.startswith("│")]


def test_the_table_has_a_line_a_step_with_the_candidates_figures_and_a_mark():
    good, bad = lines(compare(trace({}, {}), trace({}, {"loss": 0.75}), Tier.EXACT))
    assert [cell.strip() for cell in good.strip("│").split("│")] == [
        "1",
        "7",
        "64",
        "0.5",
        "0.001",
        "2",
        "0.00e+00 loss",
        "ok",
    ]
    assert [cell.strip() for cell in bad.strip("│").split("│")][3:] == [
        "0.75",
        "0.001",
        "2",
        "5.00e-01 loss",
        "DIFFERS",
    ]


def test_within_its_bound_the_table_shows_the_quantity_that_lies_furthest_off():
    near = compare(trace({}), trace({"loss": 0.5 + 1e-9, "grad_norm": 2.0 + 1e-6}), Tier.REASSOCIATED)
    assert near.equal
    assert "5.00e-07 grad_norm" in lines(near)[0]
    assert "ok" in lines(near)[0]


def test_a_missing_step_and_nan_are_shown_as_they_are():
    missing = lines(compare(trace({}, {}), trace({}), Tier.EXACT))[1]
    assert [cell.strip() for cell in missing.strip("│").split("│")] == ["2", "-", "-", "-", "-", "-", "step", "DIFFERS"]
    assert "nan loss" in lines(compare(trace({}), trace({"loss": math.nan}), Tier.EXACT))[0]


def test_figures_that_were_not_taken_are_dashes():
    bare = trace({"loss": None, "grad_norm": None, "lr": ()})
    assert lines(compare(bare, bare, Tier.EXACT))[0].count(" - ") == 3


def test_the_verdict_of_traces_that_are_equal_bit_for_bit_says_so_and_what_was_not_compared():
    assert verdict(compare(trace({}, {}), trace({}, {}), Tier.EXACT)).splitlines() == [
        "equal: 2 steps; every compared field bit for bit",
        "not compared: loss_scale, weights, metrics",
    ]


def test_the_verdict_within_bounds_shows_what_was_measured_beside_its_bound():
    held = {"weights": Weights(checksum="a" * 64, norm=10.0)}
    reference = trace({"rollouts": 1} | held, {"rollouts": 3} | held)
    moved = {"weights": Weights(checksum="b" * 64, norm=10.0 + 2e-7)}
    near = trace({"rollouts": 1} | held, {"rollouts": 3, "loss": 0.5 + 1e-7} | moved)
    assert verdict(compare(reference, near, Tier.REASSOCIATED)).splitlines() == [
        "equal: 2 steps; greatest difference loss 2e-07 of 1.3e-06 allowed, grad_norm 0 of 5.4e-07 allowed, "
        "weights 2e-08 of 1.8e-06 allowed",
        "not compared: loss_scale, metrics",
    ]


def test_the_verdict_without_anything_to_bound_is_bit_for_bit_in_the_reassociated_tier_too():
    bare = trace({"loss": None, "grad_norm": None})
    assert verdict(compare(bare, bare, Tier.REASSOCIATED)).splitlines() == [
        "equal: 1 step; every compared field bit for bit",
        "not compared: loss, grad_norm, loss_scale, weights, metrics",
    ]


def test_the_verdict_against_torch_has_one_note_on_passes():
    text = verdict(compare(trace({}, engine="torch", ranks=1), trace({"passes": 3}), Tier.REASSOCIATED))
    note, equal, left_out = text.splitlines()
    assert note == "note: passes and idle_passes are not compared: the ranks decide them (torch on 1, ds_parity on 2)"
    assert equal.startswith("equal: 1 step; greatest difference loss 0 of ")
    assert left_out == "not compared: loss_scale, weights, metrics, passes, idle_passes"


def test_the_verdict_names_the_first_difference_with_its_numbers():
    text = verdict(compare(trace({}, {}, {}), trace({}, {"loss": 0.75}, {"rollouts": 65}), Tier.EXACT))
    assert text.splitlines()[0] == (
        "differs: 2 differences in 3 steps (exact tier); the first: step 2, loss: candidate 0.75, reference 0.5 "
        "(difference 0.5, bound 0): loss must be equal bit for bit"
    )


def test_the_verdict_shows_floats_in_full_so_that_one_ulp_is_seen():
    assert repr(math.nextafter(0.5, 1)) in verdict(
        compare(trace({}), trace({"loss": math.nextafter(0.5, 1)}), Tier.EXACT)
    )


def test_the_verdict_says_first_that_the_headers_differ():
    text = verdict(compare(trace({}), trace({}, config_hash="cd"), Tier.EXACT))
    assert text.startswith("note: the headers differ in config_hash: reference 'ab', candidate 'cd'\nequal: 1 step;")


def test_the_verdict_of_a_bias_speaks_of_all_steps():
    biased = compare(trace(*[{}] * 30), trace(*[{"loss": 0.5 + 1.9e-6}] * 30), Tier.REASSOCIATED)
    assert "the first: all steps, loss, mean: " in verdict(biased)
    assert "a bias does not" in verdict(biased)


def test_the_verdict_of_empty_traces_is_that_they_differ():
    assert "the reference has no steps" in verdict(compare(trace(), trace(), Tier.EXACT))
