"""What a rank may say that it held, and what its loss weighs for it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ds_parity.errors import WindowError
from ds_parity.window import Counts, PassTotals

NAMES = ("rollouts", "prompts", "tokens")
WHOLE = st.integers(0, 10**6)
HELD = st.lists(st.builds(Counts, WHOLE, WHOLE, WHOLE), max_size=6)
UNITS = ("rollout", "token", "pass", "target")

each_count = pytest.mark.parametrize("name", NAMES)


@each_count
@pytest.mark.parametrize("value", [-1, np.int64(-3)])
def test_a_negative_count_is_refused_by_name_with_the_rule(name, value):
    with pytest.raises(WindowError, match=rf"^{name} is -\d: a count must be >= 0; pass 0 for an idle pass"):
        Counts(**{name: value})


@each_count
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5, 8.0, np.float32(8), "8", None, np.array([1, 2])])
def test_what_is_not_whole_is_refused_by_name_with_the_rule(name, value):
    with pytest.raises(WindowError, match=rf"^{name} is (?s:.*): a count must be a whole number >= 0; pass an int"):
        Counts(**{name: value})


@each_count
@pytest.mark.parametrize("value", [True, False, np.True_])
def test_a_flag_is_not_a_count(name, value):
    with pytest.raises(WindowError, match=rf"^{name} is .*{bool(value)}.*: a count must be a whole number >= 0"):
        Counts(**{name: value})


@each_count
@pytest.mark.parametrize("flag", [torch.tensor(True), torch.tensor([False]), np.array(True), np.array([True])])
def test_a_flag_in_a_tensor_or_an_array_is_not_a_count(name, flag):
    with pytest.raises(WindowError, match=rf"^{name} is .*: a count must be a whole number >= 0"):
        Counts(**{name: flag})


def test_a_count_in_a_tensor_of_whole_numbers_is_one():
    assert Counts(torch.tensor(3), torch.tensor([2]), torch.tensor(5, dtype=torch.uint8)) == Counts(3, 2, 5)


WHOLE_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@each_count
@pytest.mark.parametrize("kind", WHOLE_TYPES)
def test_a_sum_of_a_mask_is_taken_in_every_type_of_whole_numbers(name, kind):
    counted = torch.tensor([1, 0, 1, 1]).sum().to(kind)
    assert getattr(Counts(**{name: counted}), name) == 3
    assert type(getattr(Counts(**{name: counted}), name)) is int


@each_count
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_of_a_mask_of_floats_is_refused_with_the_way_to_a_whole_number(name, kind):
    """5.0 is whole, and 0.1 * 50 is not: only the caller knows whether the mask is one of zeros and ones."""
    with pytest.raises(WindowError, match=rf"^{name} is tensor\(5\.?.*: a count must be a whole number >= 0; .*int\("):
        Counts(**{name: torch.ones(5, dtype=kind).sum()})


@each_count
@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bool])
def test_a_tensor_off_the_host_is_refused_and_not_read(name, kind):
    """On an accelerator reading it would wait for all queued work; a tensor on `meta` can't be read at all."""
    with pytest.raises(WindowError) as refused:
        Counts(**{name: torch.zeros((), dtype=kind, device="meta")})
    said = str(refused.value)
    assert said.startswith(f"{name} is a tensor on 'meta': reading it would wait for all work that is queued there")
    assert "before the micro-batch is moved" in said
    assert ".item()" in said


@each_count
@pytest.mark.parametrize("value", [2**40 + 1, 2**62, 2**63, 2**80, np.uint64(2**63)])
def test_a_count_that_could_overflow_in_a_sum_is_refused_by_name_with_the_rule(name, value):
    """Two ranks with 2**62 rollouts each had a window of fewer than 0."""
    with pytest.raises(WindowError, match=rf"^{name} is {value}: a count must be <= {2**40}; .*"):
        Counts(**{name: value})


@each_count
def test_the_greatest_count_that_is_taken_fits_every_sum(name):
    """Counts of one pass are added over ranks in int64; over passes, Python adds them."""
    most = Counts(**{name: 2**40})
    assert getattr(most, name) * 4_000_000 < 2**63


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.array])
def test_a_numpy_integer_becomes_a_plain_int_that_cannot_overflow(kind):
    counts = Counts(kind(100), kind(101), kind(102))
    assert counts == Counts(100, 101, 102)
    assert {type(getattr(counts, name)) for name in NAMES} == {int}
    assert PassTotals.of([counts] * 3).tokens == 306


def test_counts_cannot_be_changed_after_they_were_checked():
    with pytest.raises(AttributeError):
        Counts(1).rollouts = -1


@pytest.mark.parametrize(("unit", "weight"), [("rollout", 3), ("token", 50), ("pass", 1), ("target", 3)])
def test_the_weight_of_a_micro_batch_is_its_rollouts_its_tokens_or_one(unit, weight):
    assert Counts(rollouts=3, prompts=2, tokens=50).in_units(unit) == weight


@pytest.mark.parametrize("unit", UNITS)
def test_a_micro_batch_that_holds_nothing_weighs_nothing(unit):
    assert Counts().in_units(unit) == 0


def test_rollouts_without_a_loss_token_have_no_token_weight():
    assert Counts(rollouts=3).in_units("token") == 0


@given(HELD, st.sampled_from(UNITS))
@example([Counts(rollouts=3)], "token")
def test_a_pass_weighs_what_its_ranks_weigh_together(held, unit):
    totals = PassTotals.of(held)
    assert totals.in_units(unit) == sum(counts.in_units(unit) for counts in held)
    assert totals.active == sum(counts.rollouts > 0 or counts.tokens > 0 for counts in held)
    assert [getattr(totals, name) for name in NAMES] == [sum(getattr(one, name) for one in held) for name in NAMES]


@given(HELD.flatmap(lambda held: st.tuples(st.just(held), st.permutations(held))))
def test_the_order_of_the_ranks_makes_no_difference(both):
    held, shuffled = both
    assert PassTotals.of(held) == PassTotals.of(shuffled)


@pytest.mark.parametrize("unit", UNITS)
def test_a_turn_that_finishes_no_rollout_is_no_idle_pass(unit):
    turn = PassTotals.of([Counts(tokens=7), Counts()])
    assert turn.active == 1
    assert turn.contributes(unit)
    assert turn.in_units(unit) == {"token": 7, "pass": 1}.get(unit, 0)


@pytest.mark.parametrize("unit", UNITS)
def test_what_holds_neither_rollouts_nor_tokens_is_idle_whatever_prompts_it_finishes(unit):
    turn = PassTotals.of([Counts(prompts=1)])
    assert (turn.active, turn.contributes(unit), turn.in_units(unit)) == (0, False, 0)


def test_the_target_counts_rollouts_or_prompts():
    totals = PassTotals(rollouts=7, prompts=2, tokens=90, active=1)
    assert (totals.counted("rollout"), totals.counted("prompt")) == (7, 2)
