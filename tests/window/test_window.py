"""Which pass closes a window, and what its step is divided by."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_parity.errors import WindowError
from ds_parity.window import Counts, Ledger, PassTotals, Progress, Rules, Weighting

OVERSHOOTS = ("carry", "reset", "error")
WEIGHTS = ("rollout", "token", "pass", "target")

each_weight = pytest.mark.parametrize("weight", WEIGHTS)


def rollouts(*numbers):
    """One rank's passes."""
    return [PassTotals(number, 0, 10 * number, int(number > 0)) for number in numbers]


def fed(ledger, passes, ahead=0):
    """Count every pass and step at each boundary; return the windows that closed."""
    closed = []
    for number, held in enumerate(passes):
        if ledger.count(held, passes[number + 1 : number + 1 + ahead]).closed:
            closed.append(ledger.settle(applied=True))
    return closed


@st.composite
def cuttings(draw, largest=1):
    """A target, a number of ranks, and passes of at most `largest` targets cut at random over the ranks."""
    target, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    passes = []
    for held in draw(st.lists(st.integers(0, largest * target), max_size=30)):
        cuts = sorted(draw(st.lists(st.integers(0, held), min_size=ranks - 1, max_size=ranks - 1)))
        passes.append([after - before for before, after in zip([0, *cuts], [*cuts, held], strict=True)])
    return target, ranks, passes


COUNTS = st.builds(Counts, st.integers(0, 5), st.integers(0, 3), st.sampled_from((0, 0, 1, 7, 30)))


@st.composite
def streams(draw, overshoots=("carry", "reset"), weights=WEIGHTS):
    """Rules, and passes of any counts on every rank, empty ones among them."""
    ranks, weight = draw(st.integers(1, 3)), draw(st.sampled_from(weights))
    count, overshoot = draw(st.sampled_from(("rollout", "prompt"))), draw(st.sampled_from(overshoots))
    rules = Rules(draw(st.integers(1, 20)), ranks, count, overshoot, weight)
    held = draw(st.lists(st.lists(COUNTS, min_size=ranks, max_size=ranks), max_size=30))
    return rules, [PassTotals.of(one) for one in held]


# What it contains.


@given(streams())
def test_a_window_tells_passes_from_the_micro_batches_of_all_ranks(stream):
    """On 2 ranks 32 passes without an idle one are 64 micro-batches, what gradient_accumulation_passes counts."""
    rules, passes = stream
    ledger, since = Ledger(rules), 0
    for number, held in enumerate(passes, 1):
        window = ledger.count(held)
        assert window.micro_batches == sum(one.active for one in passes[since:number])
        assert window.micro_batches == window.passes * rules.ranks - window.idle_passes
        if window.closed:
            ledger.settle(applied=True)
            since = number


# The boundary.


@given(cuttings())
@example((4, 1, [[1]] * 12))
@example((4, 1, [[4]] * 3))
def test_n_rollouts_give_floor_n_over_target_steps_however_they_are_cut(cutting):
    """Provided that no single pass holds more than the target."""
    target, ranks, passes = cutting
    totals = [PassTotals.of([Counts(held) for held in one]) for one in passes]
    assert len(fed(Ledger(Rules(target, ranks)), totals)) == sum(map(sum, passes)) // target


def test_a_pass_that_jumps_several_multiples_makes_one_step():
    ledger = Ledger(Rules(target=4, ranks=1))
    (jumped, after) = fed(ledger, rollouts(13, 2, 1))
    assert (jumped.rollouts, after.rollouts) == (13, 3)
    assert (jumped.closes_at, after.closes_at) == (4, 16)


@given(cuttings(largest=4))
def test_under_carry_a_pass_is_a_boundary_exactly_where_it_reaches_a_new_multiple_of_the_target(cutting):
    target, ranks, passes = cutting
    ledger, before = Ledger(Rules(target, ranks)), 0
    for held in passes:
        closed = bool(fed(ledger, [PassTotals.of([Counts(one) for one in held])]))
        assert closed == ((before + sum(held)) // target > before // target)
        before += sum(held)


@given(cuttings(largest=4))
def test_under_reset_every_window_counts_from_0(cutting):
    target, ranks, passes = cutting
    ledger, inside = Ledger(Rules(target, ranks, overshoot="reset")), 0
    for held in passes:
        inside += sum(held)
        closed = fed(ledger, [PassTotals.of([Counts(one) for one in held])])
        assert [window.rollouts for window in closed] == ([inside] if inside >= target else [])
        inside = 0 if closed else inside


def test_carry_shortens_the_next_window_by_the_surplus_and_reset_does_not():
    sizes = {
        overshoot: [window.rollouts for window in fed(Ledger(Rules(4, 1, overshoot=overshoot)), rollouts(*[3] * 8))]
        for overshoot in ("carry", "reset")
    }
    assert sizes == {"carry": [6, 3, 3, 6, 3, 3], "reset": [6, 6, 6, 6]}


@pytest.mark.parametrize(("before", "behind"), [("reset", "carry"), ("error", "carry"), ("carry", "reset")])
def test_a_run_that_goes_on_with_another_overshoot_begins_with_a_window_of_its_own(before, behind):
    """What `reset` has forgotten comes back in no window; what `carry` would have carried on is forgotten."""
    saved = Ledger(Rules(6, 1, overshoot=before))
    fed(saved, rollouts(*[3, 3] * 2 if before == "error" else [8] * 2))
    ledger = Ledger(Rules(6, 1, overshoot=behind))
    ledger.restore(saved.state())
    assert [window.rollouts for window in fed(ledger, rollouts(*[2] * 6))] == [6, 6]


@pytest.mark.parametrize("overshoot", OVERSHOOTS)
def test_a_window_closes_at_the_pass_that_reaches_the_target_not_one_later(overshoot):
    ledger = Ledger(Rules(6, 1, overshoot=overshoot))
    assert [ledger.count(held).closed for held in rollouts(2, 3, 1)] == [False, False, True]


@pytest.mark.parametrize("overshoot", ["carry", "reset"])
def test_a_pass_that_jumps_over_the_target_closes_the_window(overshoot):
    ledger = Ledger(Rules(6, 1, overshoot=overshoot))
    assert [ledger.count(held).closed for held in rollouts(5, 3)] == [False, True]


def test_under_error_a_surplus_is_refused_with_the_arithmetic_and_counts_for_nothing():
    ledger = Ledger(Rules(8, 1, overshoot="error"))
    fed(ledger, rollouts(8, 5))
    before = ledger.window
    with pytest.raises(WindowError, match=r"window 1 holds 11 rollouts, 3 more than its target of 8.*'error'"):
        ledger.count(rollouts(6)[0])
    assert (ledger.window, ledger.passes) == (before, 2)
    assert ledger.count(rollouts(3)[0]).closed


@given(cuttings())
@example((4, 1, [[4], [3], [2]]))
def test_under_error_windows_hold_exactly_the_target_or_the_run_stops(cutting):
    target, ranks, passes = cutting
    totals = [PassTotals.of([Counts(held) for held in one]) for one in passes]
    reached = accumulate((held.rollouts for held in totals), initial=0)
    jumps = any(after % target and after // target > before // target for before, after in pairwise(reached))
    ledger = Ledger(Rules(target, ranks, overshoot="error"))
    if jumps:
        with pytest.raises(WindowError, match="more than its target"):
            fed(ledger, totals)
    else:
        assert {window.rollouts for window in fed(ledger, totals)} <= {target}
    assert ledger.consumed == ledger.window.index * target


def test_the_target_counts_finished_prompts_where_count_is_prompt():
    ledger = Ledger(Rules(2, 1, count="prompt"))
    passes = [PassTotals(rollouts=9, prompts=prompts, tokens=9, active=1) for prompts in (0, 1, 0, 1, 0)]
    (window,) = fed(ledger, passes)
    assert (window.passes, window.rollouts, window.prompts) == (4, 36, 2)
    assert (ledger.consumed, ledger.rollouts, ledger.units()) == (2, 36, 0)


@given(streams())
def test_nothing_is_counted_twice_or_lost(stream):
    rules, passes = stream
    ledger = Ledger(rules)
    windows = [*fed(ledger, passes), ledger.window]
    for name in ("rollouts", "prompts", "tokens"):
        assert sum(getattr(window, name) for window in windows) == sum(getattr(held, name) for held in passes)
    assert sum(window.passes for window in windows) == len(passes)
    assert sum(window.weight for window in windows) == sum(held.in_units(rules.loss_weight) for held in passes)
    assert ledger.rollouts + ledger.window.rollouts == sum(held.rollouts for held in passes)


@given(cuttings(largest=2), st.sampled_from(WEIGHTS), st.randoms(use_true_random=False))
def test_all_ranks_decide_alike_in_whatever_order_they_add_up_the_counts(cutting, weight, chance):
    target, ranks, passes = cutting
    ledgers = [Ledger(Rules(target, ranks, loss_weight=weight)) for _ in range(ranks)]
    for held in passes:
        counts = [Counts(one, 0, 7 * one) for one in held]
        seen = []
        for ledger in ledgers:
            window = ledger.count(PassTotals.of(chance.sample(counts, ranks)))
            seen.append((window, ledger.total()))
            if window.closed:
                ledger.settle(applied=True)
        assert len(set(seen)) == 1


@given(streams())
def test_closes_with_foretells_what_count_decides_and_changes_nothing(stream):
    rules, passes = stream
    ledger = Ledger(rules)
    for held in passes:
        before = ledger.window
        foretold = ledger.closes_with(held)
        assert ledger.window == before
        assert bool(fed(ledger, [held])) == foretold


def test_the_two_clocks_are_passes_and_windows():
    ledger, seen = Ledger(Rules(4, 1)), []
    for held in rollouts(1, 0, 3, 2, 0, 0, 2):
        fed(ledger, [held])
        seen.append((ledger.passes, ledger.window.index))
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1), (7, 2)]


def test_counting_a_pass_into_a_closed_window_is_refused_until_it_is_settled():
    ledger = Ledger(Rules(4, 1))
    closed = ledger.count(rollouts(4)[0])
    with pytest.raises(WindowError, match=r"window 0 is closed and waits for its step\(\).*call step\(\)"):
        ledger.count(rollouts(1)[0])
    assert (ledger.window, ledger.passes) == (closed, 1)
    assert ledger.settle(applied=True) == closed
    assert ledger.count(rollouts(1)[0]).index == 1


# What the step is divided by.


@pytest.mark.parametrize(("weight", "total"), [("rollout", 9.0), ("token", 60.0), ("pass", 3.0), ("target", 8.0)])
def test_the_total_is_rollouts_tokens_contributing_micro_batches_or_the_constant_target(weight, total):
    ledger = Ledger(Rules(8, ranks=2, loss_weight=weight))
    (first, second) = ([Counts(2, 1, 10), Counts(3, 0, 20)], [Counts(4, 1, 30), Counts()])
    ledger.count(PassTotals.of(first))
    assert ledger.count(PassTotals.of(second)).closed
    assert ledger.total() == total
    assert isinstance(ledger.total(), float)


@each_weight
def test_idle_passes_are_counted_and_weigh_nothing(weight):
    held = [Counts(1, 1, 10), Counts(2, 1, 20), Counts(), Counts(4, 1, 40)]
    alone, among_idle = Ledger(Rules(99, 1, loss_weight=weight)), Ledger(Rules(99, 4, loss_weight=weight))
    for one in held:
        alone.count(PassTotals.of([one]))
        among_idle.count(PassTotals.of([Counts(), one, Counts(), Counts()]))
    assert (alone.window.idle_passes, among_idle.window.idle_passes) == (1, 13)
    assert among_idle.total() == alone.total()
    assert among_idle.window.expected == alone.window.expected
    assert among_idle.units() == alone.units()


@pytest.mark.parametrize(
    ("weight", "passes"), [("token", [PassTotals(rollouts=2)] * 2), *((one, []) for one in WEIGHTS)]
)
def test_the_total_of_a_window_that_holds_nothing_of_its_weight_is_0(weight, passes):
    ledger = Ledger(Rules(4, 1, loss_weight=weight))
    for held in passes:
        ledger.count(held)
    assert ledger.end().expected == 0.0
    assert ledger.total() == 0


@each_weight
@given(
    gas=st.sampled_from((1, 2, 3, 5, 6, 7)) | st.integers(1, 4096),
    ranks=st.integers(1, 9),
    counts=st.builds(Counts, st.integers(1, 33), st.integers(1, 3), st.integers(1, 10**6)),
    count=st.sampled_from(("rollout", "prompt")),
)
@example(gas=3, ranks=1, counts=Counts(49, 1, 1), count="rollout")  # 1 / 49 * 147 is not 3
def test_in_a_uniform_window_of_any_size_the_expected_total_is_exactly_the_total(weight, gas, ranks, counts, count):
    held = PassTotals.of([counts] * ranks)
    rules = Rules(gas * held.counted(count), ranks, count, loss_weight=weight)
    first = Ledger(rules).count(held)
    whole = gas * ranks * counts.in_units(weight)
    assert first.expected == (rules.target if weight == "target" else whole)
    assert first.closed == (gas == 1)


@each_weight
@pytest.mark.parametrize("gas", [3, 5, 6, 7])
def test_uniform_windows_keep_their_expected_total_from_first_pass_to_last_and_window_to_window(weight, gas):
    held = PassTotals.of([Counts(2, 1, 17)] * 3)
    ledger = Ledger(Rules(gas * 6, 3, loss_weight=weight))
    for number in range(3 * gas):
        window = ledger.count(held)
        if window.closed:
            assert number % gas == gas - 1
            assert window.expected == ledger.total()
            ledger.settle(applied=True)
    assert ledger.window.index == 3


@given(streams(), st.integers(0, 12))
def test_with_look_ahead_to_the_boundary_the_expected_total_is_the_total(stream, ahead):
    """Counted from the pass that contributes first: what it was divided by, every later one is."""
    rules, passes = stream
    ledger, first = Ledger(rules), None
    for number, held in enumerate(passes):
        window = ledger.count(held, passes[number + 1 : number + 1 + ahead])
        first = number if first is None and held.contributes(rules.loss_weight) else first
        if window.closed:
            if first is not None and number - first <= ahead and ledger.total():
                assert window.expected == ledger.total()
            ledger.settle(applied=True)
            first = None


@pytest.mark.parametrize(
    ("ahead", "weight", "correction"),
    [(0, "rollout", 4 / 5), (0, "token", 40 / 50), (0, "target", 1.0), (1, "rollout", 1.0), (1, "token", 1.0)],
)
def test_the_correction_is_what_the_accumulated_gradient_still_lacks(ahead, weight, correction):
    ledger, passes = Ledger(Rules(4, 1, loss_weight=weight)), rollouts(3, 2)
    assert ledger.window.correction == 1.0
    (window,) = fed(ledger, passes, ahead)
    assert window.closed
    assert window.correction == correction
    assert ledger.window.correction == 1.0


def test_a_window_in_which_nothing_weighs_anything_has_nothing_to_correct():
    ledger = Ledger(Rules(4, 1))
    assert ledger.count(PassTotals(0, 0, 7, 1)).correction == 1.0


@each_weight
def test_a_first_pass_that_finishes_no_prompt_gives_something_to_divide_by_all_the_same(weight):
    ledger = Ledger(Rules(8, 1, count="prompt", loss_weight=weight))
    assert ledger.count(PassTotals.of([Counts(rollouts=3, prompts=0, tokens=20)])).expected > 0


def test_look_ahead_past_the_boundary_takes_nothing_of_the_next_window():
    ledger = Ledger(Rules(4, 1))
    assert ledger.count(rollouts(1)[0], rollouts(1, 3, 4, 4)).expected == 5.0


@given(streams(), st.integers(0, 3))
def test_the_expected_total_is_0_until_a_pass_contributes_then_positive_and_fixed(stream, ahead):
    rules, passes = stream
    ledger, divided_by, contributed = Ledger(rules), 0.0, False
    for number, held in enumerate(passes):
        window = ledger.count(held, passes[number + 1 : number + 1 + ahead])
        contributed = contributed or held.contributes(rules.loss_weight)
        assert (window.expected > 0) == contributed
        assert (window.weight > 0) == (ledger.total() > 0)
        assert contributed or not window.weight
        assert divided_by in (0.0, window.expected)
        divided_by = window.expected
        if window.closed:
            ledger.settle(applied=True)
            divided_by, contributed = 0.0, False


# Ends and beginnings.


@each_weight
def test_end_closes_a_window_short_of_its_target_with_the_total_of_what_it_holds(weight):
    ledger = Ledger(Rules(8, 1, loss_weight=weight))
    fed(ledger, rollouts(8, 2, 3))
    before = ledger.window
    ended = ledger.end()
    assert (before.closed, ended.closed) == (False, True)
    assert ledger.total() == {"rollout": 5, "token": 50, "pass": 2, "target": 8}[weight]
    assert ledger.settle(applied=True) == ended
    assert (ledger.consumed, ledger.window.index, ledger.passes) == (13, 2, 3)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("overshoot", ["carry", "reset", "error"])
def test_after_an_early_end_the_next_data_starts_with_a_whole_window(overshoot, applied):
    """A loop that finishes every epoch would otherwise begin each one with a short window."""
    ledger = Ledger(Rules(8, 1, overshoot=overshoot))
    fed(ledger, rollouts(8, 5))
    ledger.end()
    ledger.settle(applied=applied)
    assert not ledger.closes_with(rollouts(7)[0])
    assert ledger.closes_with(rollouts(8)[0])


@pytest.mark.parametrize("overshoot", ["carry", "reset"])
def test_after_data_that_ended_with_a_window_the_next_data_starts_with_a_whole_one_too(overshoot):
    """The surplus of an epoch's last window would otherwise shorten the first one of the next epoch."""
    ledger = Ledger(Rules(8, 1, overshoot=overshoot))
    fed(ledger, rollouts(9))
    ledger.begin_anew()
    assert not ledger.closes_with(rollouts(7)[0])
    assert ledger.closes_with(rollouts(8)[0])
    assert (ledger.consumed, ledger.window.index, ledger.window.opened_at) == (9, 1, 9)


def test_a_skipped_step_consumes_its_rollouts_and_its_window_but_makes_no_progress():
    ledger = Ledger(Rules(4, 1))
    ledger.count(rollouts(5)[0])
    ledger.settle(applied=False)
    assert (ledger.consumed, ledger.rollouts, ledger.window.index) == (5, 5, 1)
    assert ledger.progress == Progress(4, 0)


def test_the_state_is_plain_numbers_under_fixed_names():
    ledger = Ledger(Rules(3, 1))
    fed(ledger, rollouts(2, 2, 2))
    assert ledger.state() == {
        "target": 3,
        "passes": 3,
        "windows": 2,
        "consumed": 6,
        "origin": 0,
        "rollouts": 6,
        "progress_units": 6,
    }


@given(streams(), st.data())
def test_a_restored_ledger_goes_on_exactly_like_the_original(stream, data):
    rules, passes = stream
    original, history = Ledger(rules), []
    saved = [(original.state(), 0)]
    for number, held in enumerate(passes):
        applied = data.draw(st.booleans(), label="applied")
        ends = data.draw(st.booleans(), label="ends early")
        window = original.count(held)
        if ends and not window.closed:
            window = original.end()
        history.append((held, ends, applied, window, original.total()))
        if window.closed:
            original.settle(applied=applied)
            saved.append((original.state(), number + 1))
    state, resumed_at = data.draw(st.sampled_from(saved), label="checkpoint")
    restored = Ledger(rules)
    restored.restore(json.loads(json.dumps(state)))
    assert restored.state() == state
    for held, ends, applied, window, total in history[resumed_at:]:
        again = restored.count(held)
        if ends and not again.closed:
            again = restored.end()
        assert (again, restored.total()) == (window, total)
        if again.closed:
            restored.settle(applied=applied)
    assert restored.state() == original.state()
    assert (restored.window, restored.progress) == (original.window, original.progress)


def test_shares_of_a_loss_are_divided_by_the_ranks_alone_in_every_window():
    """A caller has divided them already: passes add up, ranks are averaged, and nothing is left to correct."""
    ledger = Ledger(Rules(target=4, ranks=2), Weighting.divided(ranks=2))
    for held in (PassTotals(1, 0, 10, 1), PassTotals(5, 0, 70, 2)):
        window = ledger.count(held)
        assert (window.expected, ledger.total()) == (2.0, 2.0)
    assert window.closed
    ledger.settle(applied=True)
    ledger.count(PassTotals())
    assert ledger.total() == 0.0
    assert ledger.end().expected == 0.0


def test_a_window_that_is_ended_where_it_closes_stays_as_it_is():
    ledger = Ledger(Rules(target=4, ranks=1))
    whole = ledger.count(PassTotals(5, 0, 50, 1))
    assert ledger.end() == whole
    ledger.settle(applied=True)
    assert ledger.window.closes_at == 8


def test_weights_whose_sum_is_no_float_are_refused():
    ledger = Ledger(Rules(2, 1), Weighting("weight"))
    ledger.count(PassTotals(1, 0, 0, 1, (1e308,)))
    with pytest.raises(WindowError, match="weights of window 0 add up to infinity"):
        ledger.count(PassTotals(1, 0, 0, 1, (1e308,)))
