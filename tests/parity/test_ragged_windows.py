"""Passes that hold what they happen to, and runs that stop at one number of steps: which rules end windows there."""

import random

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.parity.diagnosis.fits import Fit
from ds_parity.trace import Header, StepRecord, Trace
from tests.parity.test_window_faults import named_between

TARGET, RANKS = 10, 2
HEADER = Header(
    scenario="toy", seed=1, versions={}, device="cpu", ranks=RANKS, config_hash="a", engine="other", dtype="fp32"
)
RULES = {
    "step-per-pass": lambda passes: True,
    "boundary-a-pass-late": lambda passes: held(passes[:-1]) >= TARGET,
    "local-count": lambda passes: max(map(sum, zip(*map(counts, passes), strict=True))) >= TARGET,
    "another-target": lambda passes: held(passes) >= TARGET + 4,
    "counter-drift": lambda passes: len(passes) == 4,
    "boundary": lambda passes: held(passes) >= TARGET,
}


def stream(seed):
    """Passes, each of which gives every rank one to three rollouts of some tokens."""
    draw = random.Random(seed)
    return [
        [[draw.randint(3, 13) for _ in range(draw.randint(1, 3))] for _ in range(RANKS)] for _ in range(400)
    ]  # fmt: skip


def counts(one_pass):
    return [len(of_rank) for of_rank in one_pass]


def held(passes):
    return sum(sum(counts(it)) for it in passes)


def cut(passes, rule, steps):
    windows, window = [], []
    for one in passes:
        window = [*window, one]
        if RULES[rule](window):
            windows, window = [*windows, window], []
        if len(windows) == steps:
            break
    return windows


def trace(windows, seed=1, begin=1):
    draw = random.Random(seed)
    steps = [
        StepRecord(
            step=step, loss=draw.random(), lr=(1e-3,), grad_norm=draw.random(), rollouts=held(window),
            prompts=held(window), tokens=tokens(window), total=float(tokens(window)), passes=len(window), idle_passes=0,
        )
        for step, window in enumerate(windows, start=1)
    ]  # fmt: skip
    return Trace(HEADER, tuple(steps[begin - 1 :]))


def tokens(window):
    return sum(sum(of_rank) for one in window for of_rank in one)


def named(rule, seed, steps):
    """What is named where the candidate ends windows by another rule than the reference, on the same stream."""
    passes = stream(seed)
    return named_between(trace(cut(passes, "boundary", steps)), trace(cut(passes, rule, steps), seed=2))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("steps", [4, 8, 14])
def test_a_step_per_pass_is_named_where_both_runs_stop_at_one_number_of_steps(steps, seed):
    (group,) = named("step-per-pass", seed, steps)
    assert "step-per-pass" in group
    assert "another-target" in group, "a target of one rollout ends a window in every pass, too"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("steps", [4, 8, 14])
@pytest.mark.parametrize("rule", ["boundary-a-pass-late", "local-count", "counter-drift"])
def test_another_target_is_named_with_the_rule_that_ends_windows_there_too(rule, steps, seed):
    assert all(rule in group for group in named(rule, seed, steps))


@pytest.mark.parametrize("seed", range(8))
def test_a_boundary_a_pass_late_is_named_alone_where_no_target_ends_windows_there(seed):
    groups = named("boundary-a-pass-late", seed, 30)
    assert groups == [{"boundary-a-pass-late"}]


@pytest.mark.parametrize("seed", range(8))
def test_another_target_stays_named(seed):
    groups = named("another-target", seed, 14)
    assert all("another-target" in group for group in groups)
    assert groups
    assert not groups[0] & {"step-per-pass"}


@pytest.mark.parametrize("steps", [4, 8, 20])
def test_a_pass_that_is_run_twice_ends_no_window_elsewhere(steps):
    """The first window holds one of its passes once more, and those behind it are the reference's."""
    for seed in range(40):
        first, *later = cut(stream(seed), "boundary", steps)
        twice = [*first, random.Random(seed).choice(first)]
        assert named_between(trace([first, *later]), trace([twice, *later], seed=2)) == []


def test_a_first_window_that_is_a_pass_longer_is_late_where_all_passes_are_alike():
    """Those behind it hold what the reference's do, of which each is a pass further on."""
    one_pass = [[7, 7], [7, 7]]
    windows = [[one_pass] * 3 for _ in range(6)]
    (group,) = named_between(trace(windows), trace([[one_pass] * 4, *windows[1:]], seed=2))
    assert "boundary-a-pass-late" in group


def test_windows_of_one_pass_on_both_sides_are_no_fault_of_the_candidate():
    passes = stream(1)
    apart = [[it] for it in passes[:8]]
    other = [[it] for it in stream(2)[:8]]
    assert not any("step-per-pass" in group for group in named_between(trace(apart), trace(other, seed=2)))


@pytest.mark.parametrize("seed", range(8))
def test_a_step_per_pass_that_has_other_rollouts_than_the_reference_is_none_of_its_passes(seed):
    """Up to the same pass, it has more of them."""
    due, own = cut(stream(seed), "boundary", 4), cut(stream(seed), "step-per-pass", 14)
    more = [replace_all(it) for it in own]
    assert not any("step-per-pass" in group for group in named_between(trace(due), trace(more, seed=2)))


def replace_all(window):
    return [[of_rank * 2 for of_rank in one] for one in window]


@pytest.mark.parametrize("begin", [1, 5])
@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_other_data_that_fit_a_rule_by_chance_leave_the_data_open(steps, begin):
    """Of sixty pairs of streams, all of which end windows at one target."""
    alone = []
    for seed in range(60):
        a, b = (cut(stream(1000 * which + seed), "boundary", steps + begin - 1) for which in (1, 2))
        sides = trace(a, begin=begin), trace(b, seed=2, begin=begin)
        found = grouped(diagnose(*sides, compare(*sides, Tier.REASSOCIATED)).causes)
        sure = [{cause.name for cause in group} for group in found if group[0].fit is Fit.SEQUENCE]
        alone += [seed for group in sure if "data-or-seed" not in group]
    assert len(alone) <= 1, alone


def test_tokens_that_are_others_after_as_many_rollouts_leave_the_data_open():
    due, same = trace(cut(stream(1), "boundary", 6)), trace(cut(stream(1), "step-per-pass", 6), seed=2)
    first = same.steps[0].model_copy(update={"tokens": (same.steps[0].tokens or 0) + 5})
    other = Trace(same.header, (first, *same.steps[1:]))
    assert [("data-or-seed" in group) for group in named_between(due, same)] == [False]
    assert [("data-or-seed" in group) for group in named_between(due, other)] == [True]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rule", ["another-target", "step-per-pass", "local-count"])
def test_longer_or_shorter_windows_of_one_stream_are_no_other_data(rule, seed):
    assert not any("data-or-seed" in group for group in named(rule, seed, 8))
