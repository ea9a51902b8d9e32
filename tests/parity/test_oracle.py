"""The oracle states a window by its definition, and the ledger, written apart from it, says the same."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.config import parse
from ds_parity.parity.subjects.oracle import coefficients, given_share, weight, windows_of
from ds_parity.planning.rollout import MicroBatch
from ds_parity.window import Counts, Ledger, PassTotals, Rules, WindowTotals

WEIGHTS = ("rollout", "token", "pass", "target")


def settings(target, **section):
    extended = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_passes": target}
    return parse({**extended, "ds_parity": section})


def batch(rollouts=0, prompts=0, tokens=0):
    return MicroBatch({}, rollouts, prompts, tokens)


@dataclass(frozen=True)
class Ended:
    """What the ledger says of one window, in the oracle's words."""

    first: int
    last: int
    expected: float
    total: float
    open: bool
    progress: Fraction


def by_ledger(passes, wanted, lookahead):
    """The windows as the engine finds them: pass by pass, from sums over the ranks."""
    rules = Rules(wanted.target, len(passes[0]), wanted.count, wanted.overshoot, wanted.loss_weight)
    ledger, ended, first = Ledger(rules), [], 0
    held = [PassTotals.of([Counts(one.rollouts, one.prompts, one.tokens) for one in row]) for row in passes]
    for index, totals in enumerate(held):
        window = ledger.count(totals, held[index + 1 :] if lookahead else ())
        last_pass = index == len(held) - 1
        if not window.closed and not last_pass:
            continue
        short = not window.closed
        ledger.end()
        expected, total = window.expected, ledger.total()
        ledger.settle(applied=total > 0)
        ended.append(
            Ended(first, index, expected, total, short, Fraction(ledger.progress.units, ledger.progress.target))
        )
        first = index + 1
    return ended


BATCHES = st.one_of(
    st.just(batch()),
    st.builds(batch, st.integers(0, 6), st.integers(0, 3), st.sampled_from((0, 1, 7, 30, 256))),
)


@st.composite
def layouts(draw):
    """The extra keys, and 1 to 25 passes of any counts on 1 to 4 ranks."""
    wanted = settings(
        draw(st.integers(1, 20)),
        count=draw(st.sampled_from(("rollout", "prompt"))),
        overshoot=draw(st.sampled_from(("carry", "reset"))),
        loss_weight=draw(st.sampled_from(WEIGHTS)),
    )
    ranks = draw(st.integers(1, 4))
    return wanted, draw(st.lists(st.lists(BATCHES, min_size=ranks, max_size=ranks), min_size=1, max_size=25))


@given(layouts())
def test_oracle_and_ledger_cut_the_passes_at_the_same_boundaries(layout):
    wanted, passes = layout
    found = [(w.first, w.last, w.open) for w in windows_of(passes, wanted)]
    assert found == [(w.first, w.last, w.open) for w in by_ledger(passes, wanted, lookahead=False)]


@given(layouts())
def test_oracle_and_ledger_divide_a_step_by_the_same_total(layout):
    wanted, passes = layout
    found = [w.total for w in windows_of(passes, wanted)]
    assert found == [w.total for w in by_ledger(passes, wanted, lookahead=False)]


def closed_by_its_first_weight(window, passes, wanted):
    """Whether the boundary is the first pass of the window that weighs anything; the tokens of a turn weigh, too."""
    before = passes[window.first : window.last]
    return not window.open and not any(one.tokens or weight(one, wanted.loss_weight) for row in before for one in row)


@given(layouts())
def test_oracle_and_ledger_expect_the_same_total_without_look_ahead(layout):
    """Bit for bit; a window that holds nothing of its weight divides no loss, and the next test has the rest."""
    wanted, passes = layout
    for planned, found in zip(windows_of(passes, wanted), by_ledger(passes, wanted, lookahead=False), strict=True):
        if planned.total and not closed_by_its_first_weight(planned, passes, wanted):
            assert planned.expected == found.expected


@given(layouts())
def test_oracle_and_ledger_expect_the_total_itself_where_the_first_pass_that_weighs_something_is_the_boundary(layout):
    """Nothing is left to guess there, look-ahead or not."""
    wanted, passes = layout
    for planned, found in zip(windows_of(passes, wanted), by_ledger(passes, wanted, lookahead=False), strict=True):
        if planned.total and closed_by_its_first_weight(planned, passes, wanted):
            assert found.expected == found.total
            assert planned.expected == found.expected


@given(layouts())
def test_with_look_ahead_to_the_boundary_oracle_and_ledger_expect_the_total_itself(layout):
    """The boundary of a window that the data ends in is never seen ahead, so it is left out."""
    wanted, passes = layout
    oracle, ledger = windows_of(passes, wanted, lookahead=True), by_ledger(passes, wanted, lookahead=True)
    for planned, found in zip(oracle, ledger, strict=True):
        if planned.total and not planned.open:
            assert planned.expected == found.expected == planned.total


@given(layouts())
def test_oracle_and_ledger_stand_at_the_same_progress_while_every_window_weighs_something(layout):
    wanted, passes = layout
    for planned, found in zip(windows_of(passes, wanted), by_ledger(passes, wanted, lookahead=False), strict=True):
        if planned.total == 0:
            break
        assert planned.progress == found.progress


def as_caller(wanted):
    return wanted.model_copy(update={"boundary": "caller", "overshoot": "carry"})


@given(layouts())
def test_windows_that_callers_end_are_those_of_the_target_with_the_same_totals(layout):
    wanted, passes = layout
    wanted = wanted.model_copy(update={"overshoot": "carry"})
    ended, counted = windows_of(passes, as_caller(wanted)), windows_of(passes, wanted)
    assert [(w.first, w.last, w.total, w.open, w.progress) for w in ended] == [
        (w.first, w.last, w.total, w.open, w.progress) for w in counted
    ]


@given(layouts())
def test_a_window_that_its_caller_ends_is_divided_by_the_last_total_that_a_ledger_keeps(layout):
    wanted, passes = layout
    wanted = as_caller(wanted)
    rules = Rules(wanted.target, len(passes[0]), wanted.count, "carry", wanted.loss_weight, by_caller=True)
    ledger = Ledger(rules)
    for number, planned in enumerate(windows_of(passes, wanted)):
        if number and ledger.last_total and wanted.loss_weight != "target":
            assert planned.expected == ledger.last_total
        rows = passes[planned.first : planned.last + 1]
        for row in rows:
            ledger.count_own(Counts(row[0].rollouts, row[0].prompts, row[0].tokens))
        held = [PassTotals.of([Counts(one.rollouts, one.prompts, one.tokens) for one in row]) for row in rows]
        sums = {name: sum(getattr(one, name) for one in held) for name in ("active", "rollouts", "prompts", "tokens")}
        weighs = sum(ledger.weighting.of(one) for one in held)
        ledger.end_with(WindowTotals(passes=len(rows), weight=weighs, **sums))
        assert planned.total == ledger.total()
        ledger.settle(applied=planned.total > 0)


def test_a_window_without_weight_makes_no_progress():
    """Spec 2, LR: an empty window moves neither scheduler nor progress; here 4 rollouts without a loss token."""
    passes = [[batch(4, 0, 0)], [batch(4, 0, 10)]]
    wanted = settings(4, loss_weight="token")
    assert [w.progress for w in by_ledger(passes, wanted, lookahead=False)] == [0, 1]
    assert [w.progress for w in windows_of(passes, wanted)] == [0, 1]


# By hand: target 4 on two ranks. The first window holds passes 0 to 2 and one rollout too many, so under carry the
# second closes at 8 with pass 3; pass 4 stays open.
PASSES = [
    [batch(1, 0, 10), batch()],
    [batch(1, 1, 30), batch(1, 1, 5)],
    [batch(), batch(2, 0, 8)],
    [batch(2, 1, 7), batch(1, 1, 20)],
    [batch(1, 1, 9), batch()],
]


@pytest.mark.parametrize(
    ("loss_weight", "totals", "expected"),
    [
        # The first pass that weighs something stands for what its window needs: 4, then 3 (carried 5 -> 8), then 4.
        ("rollout", [5.0, 3.0, 1.0], [4.0, 3.0, 4.0]),
        ("token", [53.0, 27.0, 9.0], [40.0, 27.0, 36.0]),
        ("pass", [4.0, 2.0, 1.0], [4.0, 2.0, 4.0]),
        ("target", [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]),
    ],
)
def test_totals_and_expected_totals_worked_out_by_hand(loss_weight, totals, expected):
    windows = windows_of(PASSES, settings(4, loss_weight=loss_weight))
    assert [(w.first, w.last, w.open) for w in windows] == [(0, 2, False), (3, 3, False), (4, 4, True)]
    assert [w.total for w in windows] == totals
    assert [w.expected for w in windows] == expected
    assert [w.progress for w in windows] == [Fraction(5, 4), Fraction(8, 4), Fraction(9, 4)]


def caller(passes=4, **section):
    extended = {"train_micro_batch_size_per_gpu": 1, "ds_parity": {"boundary": "caller", **section}}
    return parse(extended if passes is None else {**extended, "gradient_accumulation_passes": passes})


@pytest.mark.parametrize(
    ("section", "totals", "expected"),
    [
        # In the first window the first micro-batch of rank 0, of one rollout, four times; then the total before.
        ({"loss_weight": "token"}, [53.0, 27.0, 9.0], [40.0, 53.0, 27.0]),
        ({"loss_weight": "rollout"}, [5.0, 3.0, 1.0], [4.0, 5.0, 3.0]),
        ({"loss_weight": "target"}, [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]),
        ({"loss_weight": "divided", "across_ranks": "sum"}, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ({"loss_weight": "divided", "across_ranks": "mean"}, [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]),
    ],
)
def test_what_windows_that_callers_end_are_divided_by_worked_out_by_hand(section, totals, expected):
    windows = windows_of(PASSES, caller(**section))
    assert [w.total for w in windows] == totals
    assert [w.expected for w in windows] == expected


def test_without_a_target_the_first_micro_batches_stand_for_the_first_window_as_they_are():
    passes = [[batch(1, 0, 10), batch()], [batch(5, 0, 7), batch(2, 0, 3)], [batch(1, 0, 6), batch()]]
    windows = windows_of(passes, caller(None, loss_weight="token"))
    # Eight nominal rollouts end a window, where nothing else says what does.
    assert [(w.last, w.expected, w.total, w.open) for w in windows] == [(1, 10.0, 20.0, False), (2, 20.0, 6.0, True)]


def test_empty_windows_are_passed_over_and_a_usual_micro_batch_on_each_rank_stands_for_what_nothing_is_known_of():
    empty, some = [batch(4, 0, 0), batch()], [batch(4, 0, 9), batch()]
    windows = windows_of([empty, empty, some, empty, some], caller(loss_weight="token"))
    assert [w.total for w in windows] == [0, 0, 9, 0, 9]
    assert [w.expected for w in windows] == [2, 2, 2, 9, 9]


def test_a_loss_that_its_caller_divides_enters_by_its_tokens():
    for across, ranks in (("sum", 1), ("mean", 2)):
        wanted = caller(loss_weight="divided", across_ranks=across)
        window = windows_of(PASSES, wanted)[0]
        assert window.divided_by == 53 / ranks
        assert given_share(PASSES[0][0], window) == pytest.approx(10 * ranks / 53)
        assert coefficients(PASSES[0][0], window, wanted) == pytest.approx((10 / 53,))


def test_under_reset_the_surplus_is_forgotten_and_prompts_are_counted_where_they_are_the_unit():
    reset = windows_of(PASSES, settings(4, overshoot="reset"))
    assert [(w.first, w.last, w.open) for w in reset] == [(0, 2, False), (3, 4, False)]
    prompts = windows_of(PASSES, settings(2, count="prompt"))
    assert [(w.first, w.last, w.open, w.total) for w in prompts] == [
        (0, 1, False, 3.0),
        (2, 3, False, 5.0),
        (4, 4, True, 1.0),
    ]


def test_with_look_ahead_every_expected_total_is_the_total_where_the_window_reaches_its_target():
    windows = windows_of(PASSES, settings(4, loss_weight="token"), lookahead=True)
    assert [w.total for w in windows] == [53.0, 27.0, 9.0]
    assert [w.expected for w in windows if not w.open] == [53.0, 27.0]


@pytest.mark.parametrize("loss_weight", WEIGHTS)
def test_a_window_that_holds_nothing_has_total_0(loss_weight):
    (window,) = windows_of([[batch(), batch()]], settings(4, loss_weight=loss_weight))
    assert (window.total, window.open) == (0.0, True)
