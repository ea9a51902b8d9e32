"""Several terms on paper: what each weighs, what it is divided by, and what is refused before a step."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.errors import WindowError
from ds_parity.window import Counts, Ledger, PassTotals, Promise, Rules, Term, Terms, Weighting, WindowTotals

MIXED = Terms((Term("policy", "token"), Term("kl", "rollout", 0.5), Term("router", "pass")), 6.0)
ALIKE = Terms((Term("policy", "token"), Term("kl", "token")))


def counts_of(terms, rollouts=1, tokens=5, given=None, own=None):
    counts = Counts(rollouts, 0, tokens)
    weights = terms.weigh(counts, set(terms.names) if given is None else given, own or {})
    return Counts(rollouts, 0, tokens, weights)


def ledger_of(terms, target=6, by_caller=False):
    return Ledger(Rules(target, 2, by_caller=by_caller), Weighting.of_terms(terms, "mean"))


def both(counts):
    return PassTotals.of([counts, counts])


def test_a_term_weighs_its_unit_and_nothing_where_it_is_lacking():
    assert counts_of(MIXED, rollouts=3, tokens=7).weights == (7, 3, 1)
    assert counts_of(MIXED, rollouts=3, tokens=7, given={"kl"}).weights == (0, 3, 0)
    assert counts_of(MIXED, own={"router": 0}).weights == (5, 1, 0)
    assert counts_of(MIXED, rollouts=0, tokens=0) == Counts()


def test_a_weight_that_contradicts_the_unit_of_a_term_is_refused_but_for_several_micro_batches():
    with pytest.raises(WindowError, match=r"'router' is 0\.25, and .* is 'pass', by which this micro-batch weighs 1"):
        counts_of(MIXED, own={"router": 0.25})
    assert MIXED.weigh(Counts(3, 0, 15), set(MIXED.names), {"router": 2}, several=True) == (15, 3, 2)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", None])
def test_a_weight_of_a_term_is_finite_and_not_negative(bad):
    with pytest.raises(WindowError, match="a weight must be a finite number"):
        counts_of(MIXED, own={"kl": bad})


def test_a_term_that_is_weighed_by_a_weight_must_have_one():
    terms = Terms((Term("own", "weight"),))
    with pytest.raises(WindowError, match=r"ds_parity\.terms\.own\.weight is 'weight'"):
        counts_of(terms)
    assert counts_of(terms, own={"own": 2}).weights == (2,)


def test_unknown_names_are_refused():
    with pytest.raises(WindowError, match=r"'value': no term of ds_parity.terms, which are policy, kl, router"):
        counts_of(MIXED, given={"value"})


def test_terms_of_different_units_are_refused_before_the_first_backward_where_totals_are_unknown():
    ledger = ledger_of(MIXED)
    with pytest.raises(WindowError, match=r"policy by token, kl by rollout, router by pass.*engine\.expect"):
        ledger.count(both(counts_of(MIXED)))
    assert (ledger.passes, ledger.window.passes) == (0, 0)


def test_passes_that_are_known_give_each_term_its_own_total():
    ledger = ledger_of(MIXED)
    one = both(counts_of(MIXED))
    window = ledger.count(one, [one, one])
    assert (window.divisors, window.expected) == ((30, 6, 6), 1)
    ledger.count(one)
    assert ledger.count(one).closed
    assert ledger.total() == 1


def test_a_promise_gives_the_totals_and_is_held_against_the_window():
    ledger = ledger_of(MIXED)
    said = WindowTotals(0, 0, 6, 0, 30, 42.0, (30, 6, 6))
    ledger.promise(Promise(said, frozenset({"rollouts", "tokens", "weights"})))
    one = both(counts_of(MIXED))
    assert ledger.count(one).divisors == (30, 6, 6)
    ledger.count(one)
    with pytest.raises(WindowError, match=r"contains 32 tokens.*expect\(\) has said 30 tokens"):
        ledger.count(both(counts_of(MIXED, tokens=6)))
    assert ledger.count(one).closed
    ledger.settle(applied=True)
    assert ledger.promised is None


def test_weights_that_are_added_in_another_order_keep_a_promise():
    terms = Terms((Term("own", "weight"), Term("policy", "token")))
    ledger = ledger_of(terms, target=6)
    ledger.promise(Promise(WindowTotals(0, 0, 6, 0, 30, 31.2, (1.2, 30)), frozenset({"rollouts", "weights"})))
    for weight in (0.1, 0.2, 0.3):
        window = ledger.count(both(counts_of(terms, own={"own": weight})))
    assert window.closed
    assert window.weights[0] != 1.2


def test_a_promise_of_nothing_does_not_refuse_an_empty_window():
    ledger = ledger_of(MIXED, by_caller=True)
    ledger.promise(Promise(WindowTotals(), frozenset({"rollouts", "tokens"})))
    ledger.expect(2.0)
    ledger.count_own(Counts())
    assert ledger.end_with(WindowTotals(1, 0)).closed
    assert ledger.total() == 0


def test_between_windows_no_totals_are_needed():
    ledger = ledger_of(MIXED, by_caller=True)
    ledger.expect(2.0)
    assert ledger.window.expected == 0
    with pytest.raises(WindowError, match=r"whose totals are not known"):
        ledger.refuse_unknown_totals()


def test_nothing_is_counted_in_a_window_that_is_closed():
    ledger = ledger_of(ALIKE, by_caller=True)
    ledger.end_with(WindowTotals(1, 2, 2, 0, 10, 20.0, (10, 10)))
    for call in (lambda: ledger.count_own(counts_of(ALIKE)), lambda: ledger.end_with(WindowTotals(1))):
        with pytest.raises(WindowError, match="is closed and waits for its step"):
            call()


def test_a_constant_total_is_the_target():
    terms = Terms((Term("policy", "target"), Term("kl", "rollout")), 6.0)
    ledger = ledger_of(terms)
    one = both(counts_of(terms, rollouts=4))
    assert ledger.count(one, [one]).divisors == (6, 8)


def test_a_window_without_a_token_has_no_mean_over_tokens_and_says_what_to_do():
    terms = Terms((Term("policy", "token"), Term("kl", "rollout")))
    with pytest.raises(WindowError, match=r"or none that has it has a token.*Leave rollouts without a token out"):
        terms.divisors((0.0, 2.0))
    with pytest.raises(WindowError, match=r"term 'kl' of ds_parity.terms in this window, so that it"):
        terms.divisors((2.0, 0.0))


def test_a_term_of_nobody_is_refused_and_a_weight_of_0_is_not():
    ledger = ledger_of(MIXED)
    lacking = both(counts_of(MIXED, rollouts=3, given={"policy", "kl"}))
    with pytest.raises(WindowError, match="no micro-batch of any rank has the term 'router'"):
        ledger.count(lacking)
    terms = Terms((Term("policy", "token"), Term("own", "weight")))
    window = ledger_of(terms).count(both(counts_of(terms, rollouts=3, own={"own": 0})))
    assert window.divisors == (10, 0)


def test_terms_of_one_unit_need_all_of_each_other():
    ledger = ledger_of(ALIKE)
    assert ledger.count(both(counts_of(ALIKE))).divisors == ()
    with pytest.raises(WindowError, match=r"weigh differently in window 0 \(policy 20, kl 10\)"):
        ledger.count(both(counts_of(ALIKE, rollouts=2, given={"policy"})))


@pytest.mark.parametrize("by_caller", [False, True])
def test_a_term_of_one_unit_that_a_whole_window_lacks_is_named_with_a_way_out_at_once(by_caller):
    """A warm-up of one term alone: no totals that are known ahead would help it."""
    ledger = ledger_of(ALIKE, by_caller=by_caller)
    lacking = counts_of(ALIKE, rollouts=3, given={"policy"})
    if by_caller:
        ledger.count_own(lacking)
        end = functools.partial(ledger.end_with, WindowTotals(1, 2, 6, 0, 10, 10.0, (10, 0)))
    else:
        end = functools.partial(ledger.count, both(lacking))
    with pytest.raises(WindowError, match=r"'kl'.*has no mean.*0 times a loss.*'weight'.*weight=\{'kl': 0\}") as raised:
        end()
    assert "corrected by several factors" not in str(raised.value)


def test_an_empty_window_of_terms_of_one_unit_is_not_refused():
    assert ledger_of(ALIKE, by_caller=True).end_with(WindowTotals(1, weights=(0.0, 0.0))).closed


passes = st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 9))] * 2), min_size=1, max_size=12)


@given(passes)
def test_where_the_caller_ends_it_a_window_contains_what_all_ranks_ran(ran):
    """Each rank counts its own; at the end all stand at the same window, whatever they ran."""
    ledgers = [Ledger(Rules(0, 2, loss_weight="token", by_caller=True)) for _ in range(2)]
    own = [[Counts(rollouts, 0, tokens) for rollouts, tokens in (row[rank] for row in ran)] for rank in range(2)]
    own[1] = own[1][: len(own[1]) // 2]  # ranks may run different numbers of micro-batches
    for ledger, counted in zip(ledgers, own, strict=True):
        for counts in counted:
            assert not ledger.count_own(counts).closed
    everything = [counts for counted in own for counts in counted]
    totals = WindowTotals(
        max(map(len, own)),
        sum(counts.active for counts in everything),
        *(sum(getattr(counts, name) for counts in everything) for name in ("rollouts", "prompts", "tokens")),
        weight=sum(counts.tokens for counts in everything),
    )
    windows = [ledger.end_with(totals) for ledger in ledgers]
    assert windows[0] == windows[1]
    assert (windows[0].closed, windows[0].weight) == (True, totals.weight)
    assert windows[0].micro_batches + windows[0].idle_passes == 2 * totals.passes
    for ledger in ledgers:
        ledger.settle(applied=bool(totals.weight))
    assert ledgers[0].state() == ledgers[1].state()
    assert ledgers[0].last_total == totals.weight
    assert ledgers[0].window.index == 1


def test_a_sum_that_was_rounded_to_fp32_keeps_a_promise_and_another_number_breaks_it():
    """What `float(weights.sum())` of an fp32 tensor gives where each weight is given by itself."""
    terms = Terms((Term("own", "weight"), Term("policy", "token")))
    for said, kept in ((3.4000000953674316, True), (3.4001, False)):
        ledger = ledger_of(terms, target=2)
        ledger.promise(Promise(WindowTotals(0, 0, 2, 0, 10, 13.4, (said, 10)), frozenset({"rollouts", "weights"})))
        totals = both(counts_of(terms, own={"own": 3.3999999314546585 / 2}))
        if kept:
            assert ledger.count(totals).closed
        else:
            with pytest.raises(WindowError, match=r"expect\(\) has said"):
                ledger.count(totals)


@pytest.mark.parametrize("how", ["finished", "others", "dropped"])
def test_passes_that_were_read_ahead_and_never_ran_are_no_totals_of_their_window(how):
    """A loop that leaves passes() inside a window: its losses were divided by what had been read."""
    ledger = ledger_of(MIXED)
    one, other = both(counts_of(MIXED)), both(counts_of(MIXED, tokens=50))
    assert ledger.count(one, [one, one]).divisors == (30, 6, 6)
    if how == "dropped":
        ledger.drop()
        assert ledger.end().closed
        ledger.settle(applied=False)
        assert ledger.count(one, [one, one]).divisors == (30, 6, 6)
        return
    if how == "others":
        ledger.count(other)
    with pytest.raises(WindowError, match=r"had read ahead of it, which was something else.*load a checkpoint"):
        ledger.count(other) if how == "others" else ledger.end()


def test_terms_of_one_unit_are_refused_too_where_one_factor_does_not_correct_them():
    """A micro-batch that lacks a term was read ahead and never ran."""
    ledger = ledger_of(ALIKE)
    one, lacking = both(counts_of(ALIKE)), both(counts_of(ALIKE, own={"kl": 0}))
    assert ledger.count(one, [one, lacking]).divisors == (30, 20)
    with pytest.raises(WindowError, match="had read ahead of it"):
        ledger.end()
    ledger = ledger_of(ALIKE)
    ledger.count(one, [one, one])
    assert ledger.end().closed  # one factor corrects both
