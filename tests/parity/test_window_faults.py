"""Streams of rollouts that are cut into windows otherwise: the first causes contain the fault, or none is named."""

import random

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.parity.diagnosis.cut import Cut
from ds_parity.trace import Header, StepRecord, Trace
from tests.parity.lines_run import lines_run

TARGET = 16
STREAMS = {
    "alike": lambda draw: 2,
    "few": lambda draw: draw.randint(1, 4),
    "many": lambda draw: draw.randint(3, 7),
    "odd": lambda draw: draw.choice((1, 1, 2, 5)),
}


def stream(name, passes=100, seed=0):
    draw = random.Random(seed)
    return [STREAMS[name](draw) for _ in range(passes)]


def cut(held, target=TARGET, *, carried=True, ended=lambda count, had, passes, target: count >= target):
    """Windows as pairs of rollouts and passes; `ended` says when one ends, by its count, rollouts and passes."""
    windows, had, passes, surplus = [], 0, 0, 0
    for rollouts in held:
        had, passes = had + rollouts, passes + 1
        if ended(had + surplus, had, passes, target):
            surplus = had + surplus - target if carried else 0
            windows.append((had, passes))
            had = passes = 0
    return [*windows, (had, passes)] if passes else windows


def resumed(held, after):
    """The surplus of the windows before is forgotten."""
    before = cut(held)[:after]
    return before + cut(held[sum(passes for _, passes in before) :])


def of_multiples(held, target):
    """Rollouts of all windows come to a multiple of the target, and the run ends with the last one."""
    windows, had, passes, consumed = [], 0, 0, 0
    for rollouts in held:
        had, passes, consumed = had + rollouts, passes + 1, consumed + rollouts
        if consumed % target == 0:
            windows.append((had, passes))
            had = passes = 0
    return windows


def exact(held):
    """The same of the usual target, up to the end of the data."""
    windows = of_multiples(held, TARGET)
    left = held[sum(passes for _, passes in windows) :]
    return [*windows, (sum(left), len(left))] if left else windows


def split(windows, at):
    (held, passes), half = windows[at], windows[at][1] // 2
    parts = [(held // 2, half), (held - held // 2, passes - half)]
    return windows[:at] + parts + windows[at + 1 :]


def interrupted(held, at, *, carried=True):
    """A window ends with its first pass, or half of its passes, and what follows is counted anew."""
    before = cut(held, carried=carried)
    begin = sum(passes for _, passes in before[:at])
    until = begin + max(1, before[at][1] // 2)
    return [*before[:at], (sum(held[begin:until]), until - begin), *cut(held[until:], carried=carried)]


def early(held, *, carried=True):
    """Every window ends before the pass that would reach the target, but for one that its first pass reaches."""
    windows, had, passes, count = [], 0, 0, 0
    for rollouts, following in zip(held, [*held[1:], 0], strict=True):
        had, passes, count = had + rollouts, passes + 1, count + rollouts
        if count + following >= TARGET:
            windows.append((had, passes))
            had, passes, count = 0, 0, count - TARGET if carried else 0
    return [*windows, (had, passes)] if passes else windows


FAULTS = {
    **{f"target {it}": (lambda held, it=it: cut(held, it), {"another-target"}) for it in (2, 8, 10, 14, 17, 20, 24)},
    **{f"target {it}": (lambda held, it=it: cut(held, it), {"another-target"}) for it in (32, 40, 48, 64)},
    "two ranks": (lambda held: cut(held, 2 * TARGET), {"local-count"}),
    "surplus dropped": (lambda held: cut(held, carried=False), {"another-overshoot"}),
    "six passes": (lambda held: cut(held, ended=lambda c, h, passes, t: passes == 6), {"counter-drift"}),
    "exactly": (exact, {"equality-boundary"}),
    "exactly once": (lambda held: cut(held, ended=lambda count, h, p, t: count == t), {"equality-boundary"}),
    **{f"resumed {it}": (lambda held, it=it: resumed(held, it), {"resume-resets-window"}) for it in (2, 4)},
    "others first": (lambda held: cut(held[1:] + held[:1]), set()),
    "one lost": (lambda held: cut(held[1:]), {"silent-truncation"}),
    "half of them": (lambda held: cut(held[::2]), {"silent-truncation"}),
    "ended early": (lambda held: cut(held[:70]), set()),
    "no more than three": (lambda held: cut([min(3, it) for it in held]), {"silent-truncation"}),
    "a step within": (lambda held: split(cut(held), 3), {"step-in-mid-window"}),
    **{f"anew at {it}": (lambda held, it=it: interrupted(held, it), {"step-in-mid-window"}) for it in (0, 1, 3, 7)},
    "a pass late": (lambda held: _shifted(held, 1), {"boundary-a-pass-late"}),
    "a pass early": (lambda held: _shifted(held, -1), {"boundary-off-by-one"}),
    "each a pass early": (early, {"boundary-off-by-one"}),
    "a pass first": (lambda held: [(held[0], 1), *cut(held[1:])], {"boundary-off-by-one"}),
    "every pass": (lambda held: [(it, 1) for it in held], {"step-per-pass"}),
}


def _shifted(held, by):
    """Every window ends so many passes late, or early; the last one with the data."""
    ends = [sum(passes for _, passes in cut(held)[: n + 1]) + by for n in range(len(cut(held)))]
    starts, ends = [0, *ends], [*ends[:-1], len(held)]
    parts = [held[x:y] for x, y in zip(starts, ends, strict=False)]
    return [(sum(part), len(part)) for part in parts if part]


ALIKE = stream("alike")


def test_a_first_pass_that_is_lost_ends_no_window_early():
    due = cut(ALIKE)[:6]
    lost = [(due[0][0] - 2, due[0][1] - 1), *due[1:]]
    assert not {"boundary-off-by-one", "step-in-mid-window"} & {name for group in named(due, lost) for name in group}


def test_a_first_window_that_was_cut_short_once_is_named_beside_a_counter_that_begins_at_one():
    assert {"boundary-off-by-one", "step-in-mid-window"} <= named(cut(ALIKE), _shifted(ALIKE, -1))[0]


@pytest.mark.parametrize("target", [8, 14, 24, 32, 40, 48, 64])
@pytest.mark.parametrize("passes", [True, False])
def test_a_test_for_the_target_itself_is_not_blamed_where_it_would_have_met_all_of_them(target, passes):
    """Passes that are all alike meet each target exactly; here each has a rollout on every rank."""
    due, own = ([(5 * held // 2, some) for held, some in cut(ALIKE, it)] for it in (TARGET, target))
    (group, *_) = named(due, own, ranks=5, passes=passes, idle=0)
    assert "another-target" in group
    assert not {"equality-boundary", "local-count"} & group


@pytest.mark.parametrize("name", ["few", "many", "odd"])
def test_a_test_for_the_target_itself_is_named_where_it_goes_on_past_all_that_are_jumped_over(name):
    held = stream(name)
    for own in (exact(held), FAULTS["exactly once"][0](held)):
        assert "equality-boundary" in named(cut(held), own)[0]


@pytest.mark.parametrize(("target", "rollouts"), [(4, 3), (5, 3), (5, 4), (7, 3), (10, 4), (9, 6)])
@pytest.mark.parametrize("carried", [True, False])
def test_a_test_of_all_rollouts_is_named_where_passes_jump_over_the_target_of_each_window(target, rollouts, carried):
    """Passes of three on three ranks and a target of four come to a multiple of it in every fourth pass."""
    held = [rollouts] * 120
    (group, *_) = named(cut(held, target, carried=carried), of_multiples(held, target), ranks=rollouts, idle=0)
    assert "equality-boundary" in group
    assert "another-target" in group


@pytest.mark.parametrize(("target", "own"), [(4, 9), (4, 21), (5, 24), (7, 12), (7, 18), (7, 6)])
def test_a_target_is_no_test_of_all_rollouts_where_its_windows_pass_a_multiple_or_end_at_none(target, own):
    """For each target that the reference may have, by its windows."""
    held = [3] * 120
    (group, *_) = named(cut(held, target, carried=False), cut(held, own, carried=False), ranks=3, idle=0)
    assert "another-target" in group
    assert "equality-boundary" not in group


@pytest.mark.parametrize("name", ["alike", "few", "many"])
def test_a_doubled_target_on_two_ranks_has_the_windows_of_a_local_count(name):
    held = stream(name)
    assert named(cut(held), cut(held, 2 * TARGET)) == [{"local-count", "another-target"}]


@pytest.mark.parametrize("name", ["few", "many"])
@pytest.mark.parametrize("seed", range(3))
def test_a_surplus_that_is_dropped_is_no_resume(name, seed):
    held = stream(name, seed=seed)
    group = named(cut(held), cut(held, carried=False))[0]
    assert "another-overshoot" in group
    assert "resume-resets-window" not in group


def test_a_candidate_that_carries_on_what_the_reference_drops_is_named():
    held = stream("few")
    assert "another-overshoot" in named(cut(held, carried=False), cut(held))[0]


def test_another_target_is_named_where_one_run_has_more_data():
    held = stream("few", passes=200)
    assert "another-target" in named(cut(held[:100]), cut(held, 24))[0]


def test_a_target_that_is_another_in_windows_that_epochs_cut_short_is_not_known():
    """No one target ends the reference's windows."""
    epochs = [window for _ in range(4) for window in cut(ALIKE[:20])]
    assert named(epochs, cut(ALIKE[:80], 24)) == []


def trace(windows, seed, ranks, passes=True, idle=None):
    """As many ranks are idle in each pass: all but one, as passes of a single rollout have it, if none are named."""
    idle = ranks - 1 if idle is None else idle
    draw = random.Random(seed)
    header = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=ranks, config_hash="a", engine="other")
    steps = [
        StepRecord(
            step=n, loss=draw.random(), lr=(1e-3,), grad_norm=draw.random(), rollouts=held, prompts=4,
            tokens=50 * held, total=50.0 * held, passes=some if passes else None, idle_passes=some * idle,
        )
        for n, (held, some) in enumerate(windows, start=1)
    ]  # fmt: skip
    return Trace(header, tuple(steps))


def named(due, own, *, ranks=2, passes=True, idle=None):
    return named_between(trace(due, 1, ranks, passes, idle), trace(own, 2, ranks, passes, idle))


def named_between(a, b):
    found = compare(a, b, Tier.REASSOCIATED)
    return [{cause.name for cause in group} for group in grouped(diagnose(a, b, found).causes)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_causes_of_other_windows_contain_the_fault(fault, name, seed, ranks):
    held = stream(name, seed=seed)
    due, (make, right) = cut(held), FAULTS[fault]
    if fault == "two ranks" and ranks != 2:
        return
    # As many passes in all windows are a target where all passes are alike.
    right = right | {"another-target"} if fault == "six passes" and name == "alike" else right
    for passes in (True, False):
        groups = named(due, make(held), ranks=ranks, passes=passes) if make(held) != due else []
        assert not groups or groups[0] & right, (groups, due[:6], make(held)[:6])


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STREAMS)
def test_a_boundary_a_pass_early_is_named_where_no_window_reaches_the_target_and_the_next_pass_would(
    name, seed, carried
):
    held = stream(name, seed=seed)
    (group, *_) = named(cut(held, carried=carried), early(held, carried=carried))
    assert "boundary-off-by-one" in group
    assert "boundary-a-pass-late" not in group


def first_group_of_another_target(name, target, carried):
    held = stream(name)
    (group, *_) = named(cut(held, carried=carried), cut(held, target, carried=carried))
    assert "another-target" in group
    return group


@pytest.mark.parametrize("target", [4, 8, 20, 24])
@pytest.mark.parametrize("name", ["alike", "few"])
@pytest.mark.parametrize("carried", [True, False])
def test_another_target_is_no_boundary_a_pass_early(name, target, carried):
    """Behind its windows another pass would not reach the reference's target, or they have reached it."""
    assert "boundary-off-by-one" not in first_group_of_another_target(name, target, carried)


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3, 7])
@pytest.mark.parametrize("name", ["few", "many", "odd"])
def test_a_step_within_a_window_is_named_where_what_follows_is_counted_anew(name, at, carried):
    held = stream(name)
    (group, *_) = named(cut(held, carried=carried), interrupted(held, at, carried=carried))
    assert "step-in-mid-window" in group
    assert ("boundary-off-by-one" in group) <= (at == 0)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_window_that_lacks_a_pass_was_not_cut_short(name, at):
    due = cut(stream(name))
    own = [*due[:at], (due[at][0] - 1, due[at][1] - 1), *due[at + 1 :]]
    assert not any("step-in-mid-window" in group for group in named(due, own))


@pytest.mark.parametrize("target", [10, 14, 15, 17])
@pytest.mark.parametrize("name", ["few", "many", "odd"])
@pytest.mark.parametrize("carried", [True, False])
def test_another_target_is_no_step_within_a_window(name, target, carried):
    assert "step-in-mid-window" not in first_group_of_another_target(name, target, carried)


@pytest.mark.parametrize("name", ["few", "many", "odd"])
def test_windows_of_one_pass_each_are_no_counters(name):
    held = stream(name)
    group = named(cut(held), [(it, 1) for it in held])[0]
    assert "step-per-pass" in group
    assert "counter-drift" not in group


WINDOW_MODULES = tuple(f"diagnosis/{it}.py" for it in ("targets", "cut", "windows", "ragged", "streams"))


@pytest.mark.parametrize("passes", [1, 0])
def test_the_work_on_windows_does_not_grow_with_the_rollouts_that_they_hold(passes):
    few, many = (
        lines_run(lambda held=held: named([(held, passes)] * 40, [(held // 2, passes)] * 80), *WINDOW_MODULES)
        for held in (8, 4000)
    )
    assert many <= 2 * few


def uneven(steps, draw):
    """Windows of the same run up to four fifths of its steps, of which the next two share their rollouts otherwise."""
    due = [(64 + draw.randint(0, 3), 4) for _ in range(steps)]
    own, at = list(due), steps * 4 // 5
    own[at], own[at + 1] = (due[at][0] + 3, 4), (due[at + 1][0] - 3, 4)
    return due, own


def with_one_surplus(steps, draw):
    """The same of windows that all have the same surplus, with which a resume might be in any of them."""
    due = [(17, 4), *[(16, 4)] * (steps - 1)]
    at = steps * 4 // 5
    return due, [*due[:at], (17, 4), (15, 4), *due[at + 2 :]]


@pytest.mark.parametrize("make", [uneven, with_one_surplus])
def test_the_work_on_windows_grows_with_their_number_and_not_with_its_square(make):
    few, many = (lines_run(lambda n=n: named(*make(n, random.Random(1))), *WINDOW_MODULES) for n in (50, 400))
    assert many <= 2 * 8 * few


@pytest.mark.parametrize("seed", range(5))
def test_targets_among_some_are_those_that_are_among_all(seed):
    draw = random.Random(seed)
    held = [draw.randint(1, 4) for _ in range(40)]
    a, b = cut(held), cut(held, 24)
    both = Cut(*([it for it, _ in side] for side in (a, b)), *([it for _, it in side] for side in (b, a)))
    for side in (0, 1):
        for after in range(3):
            every = both.targets(side, carried=True, after=after)
            for some in (range(10, 17), range(20, 30), range(1, 100)):
                found = both.targets(side, carried=True, after=after, among=some)
                assert set(found) == set(every) & set(some)


@pytest.mark.parametrize("passes", [True, False])
def test_a_test_for_the_target_itself_is_named_where_it_meets_none_of_the_boundaries(passes):
    """All of the run is one window then, whichever target it jumps over."""
    held = [3] * 40
    (group, *_) = named(cut(held, 16), [(sum(held), len(held))], passes=passes)
    assert "equality-boundary" in group


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("begins", [2, 3, 4, 7, 12])
@pytest.mark.parametrize("turn", [False, True])
def test_a_trace_that_begins_later_is_no_other_way_to_cut_windows(name, begins, turn):
    """That of a resumed run, beside the trace of the whole."""
    whole = trace(cut(stream(name)), 1, 2, True)
    later = Trace(whole.header, whole.steps[begins - 1 :])
    sides = (later, whole) if turn else (whole, later)
    found = diagnose(*sides, compare(*sides, Tier.REASSOCIATED))
    assert found.causes == ()
    own, due = (1, begins) if turn else (begins, 1)
    said = f"the candidate begins with step {own}, and the reference with step {due}; the steps that both have agree"
    assert said in found.certain
