"""A foreign trace is held to all that its trainer records, in the digits that it was written with, and no further."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_parity.parity.comparison.alignment import align, stride
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.trace import Header, Precision, StepRecord, Trace

EXACT, REASSOCIATED = Tier.EXACT, Tier.REASSOCIATED
OWN = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=2, config_hash="ab", engine="ds_parity")
COUNTS = ("passes", "idle_passes", "rollouts", "prompts", "tokens", "total", "skipped")
UNKNOWN = dict.fromkeys((*COUNTS, "loss", "lr", "grad_norm"))
LOSS = {step: 2.0 / step for step in range(1, 401)}


def own(steps=range(1, 4), **changes):
    counts = {"passes": 2, "idle_passes": 1, "rollouts": 4, "prompts": 2, "tokens": 100, "total": 4.0}
    figures = {"lr": (1e-3,), "grad_norm": 2.0, **changes}
    return Trace(OWN, tuple(StepRecord(**{"step": step, "loss": LOSS[step], **counts, **figures}) for step in steps))


def foreign(steps=range(1, 4), records=("loss", "lr", "grad_norm"), change=(), engine="other", **options):
    """A trace of the fields that it records, equal to ours but for changes: (step, field) to value."""
    nothing = dict.fromkeys(("scenario", "seed", "versions", "device", "ranks", "config_hash"))
    lines = []
    for step in steps:
        figures = {"loss": LOSS[step], "lr": (1e-3,), "grad_norm": 2.0, "rollouts": 4}
        figures = {name: figures[name] for name in records}
        figures |= {name: value for (at, name), value in dict(change).items() if at == step}
        lines.append(StepRecord(**{**UNKNOWN, **figures, "step": step}))
    return Trace(Header(**nothing, engine=engine, records=records), tuple(lines), **options)


def means(every, last):
    """The mean loss of every so many steps."""
    ends = range(every, last + 1, every)
    return {(end, "loss"): math.fsum(LOSS[step] for step in range(end - every + 1, end + 1)) / every for end in ends}


def fields(comparison):
    return [(difference.step, difference.field) for difference in comparison.differences]


def told(comparison, words):
    return [note for note in comparison.notes if words in note]


BOTH_WAYS = pytest.mark.parametrize("swap", [False, True])


def held(a, b, swap, tier=REASSOCIATED):
    return compare(b, a, tier) if swap else compare(a, b, tier)


class TestFields:
    @BOTH_WAYS
    def test_what_the_trainer_does_not_record_is_left_out_and_named(self, swap):
        comparison = held(own(), foreign(records=("loss",)), swap)
        assert comparison.equal
        assert {*COUNTS, "lr", "grad_norm"} <= set(comparison.not_compared)
        side = "reference" if swap else "candidate"
        (note,) = told(comparison, f"no value of them was read from the {side} (other)")
        assert all(name in note for name in (*COUNTS, "lr", "grad_norm"))

    @pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "rollouts"])
    @BOTH_WAYS
    def test_what_it_records_in_some_steps_only_is_a_difference(self, swap, name):
        other = foreign(records=("loss", "lr", "grad_norm", "rollouts"), change={(2, name): None})
        comparison = held(own(), other, swap)
        assert (2, name) in fields(comparison)
        assert "only" in comparison.first.why

    @BOTH_WAYS
    def test_what_it_claims_to_record_and_never_does_is_a_difference(self, swap):
        other = foreign(change={(step, "grad_norm"): None for step in (1, 2, 3)})
        assert fields(held(own(), other, swap)) == [(step, "grad_norm") for step in (1, 2, 3)]

    def test_what_it_records_beyond_its_claim_is_compared(self):
        other = foreign(records=("loss",), change={(step, "lr"): (2e-3,) for step in (1, 2, 3)})
        assert fields(compare(own(), other, REASSOCIATED)) == [(step, "lr") for step in (1, 2, 3)]

    @pytest.mark.parametrize("name", [*COUNTS, "loss", "lr", "grad_norm"])
    @pytest.mark.parametrize("tier", [EXACT, REASSOCIATED])
    @BOTH_WAYS
    def test_an_absent_field_of_our_own_stays_a_difference(self, swap, tier, name):
        bare = own(**{name: None})
        assert {field for _, field in fields(held(own(), bare, swap, tier))} == {name}

    @pytest.mark.parametrize(("name", "value"), [("loss", 9.0), ("lr", (2e-3,)), ("grad_norm", 3.0), ("rollouts", 5)])
    @BOTH_WAYS
    def test_a_wrong_figure_is_a_difference(self, swap, name, value):
        other = foreign(records=("loss", "lr", "grad_norm", "rollouts"), change={(2, name): value})
        assert (2, name) in fields(held(own(), other, swap))

    @pytest.mark.parametrize("name", ["loss", "grad_norm", "lr"])
    @BOTH_WAYS
    def test_nan_never_equals_whatever_the_digits(self, swap, name):
        bad = (math.nan,) if name == "lr" else math.nan
        other = foreign(change={(2, name): bad}, precision={name: Precision(decimals=0)})
        for comparison in (held(own(), other, swap), held(own(**{name: bad}), other, swap), held(other, other, swap)):
            assert (2, name) in fields(comparison)

    @BOTH_WAYS
    def test_traces_without_a_field_in_common_are_not_equal(self, swap):
        a, b = foreign(records=("loss",)), foreign(records=("lr",))
        comparison = held(a, b, swap)
        assert "share no field" in comparison.first.why
        assert not held(own(lr=None, grad_norm=None), foreign(records=()), swap).equal
        assert not held(foreign(records=()), foreign(records=()), swap).equal

    @BOTH_WAYS
    def test_an_empty_foreign_trace_is_not_equal(self, swap):
        assert not held(own(), foreign(steps=()), swap).equal
        assert not held(foreign(steps=()), foreign(steps=()), swap).equal

    def test_what_it_does_not_know_of_the_run_is_no_news(self):
        assert not told(compare(own(), foreign(), REASSOCIATED), "the headers differ")
        assert not told(compare(own(), foreign(), REASSOCIATED), "the ranks decide")

    @BOTH_WAYS
    def test_one_lr_is_held_against_every_parameter_group_and_that_is_noted(self, swap):
        comparison = held(own(lr=(1e-3, 1e-3)), foreign(), swap)
        assert comparison.equal
        assert told(comparison, "each of 2 parameter groups")
        assert fields(held(own(lr=(1e-3, 1e-4)), foreign(), swap)) == [(step, "lr") for step in (1, 2, 3)]
        two = foreign(change={(step, "lr"): (1e-3, 1e-3) for step in (1, 2, 3)})
        assert not told(held(own(lr=(1e-3, 1e-3)), two, swap), "parameter groups")
        assert not held(own(lr=(1e-3,)), own(lr=(1e-3, 1e-3)), swap).equal

    @BOTH_WAYS
    def test_passes_that_were_mapped_are_compared_where_the_ranks_are_unknown(self, swap):
        other = foreign(records=("loss",), change={(step, "passes"): 2 + (step == 2) for step in (1, 2, 3)})
        assert fields(held(own(), other, swap)) == [(2, "passes")]

    def test_its_own_notes_come_with_its_side(self):
        assert told(compare(own(), foreign(notes=("x is y",)), REASSOCIATED), "the candidate (other): x is y")


class TestDigits:
    @pytest.mark.parametrize("name", ["loss", "grad_norm", "lr"])
    @pytest.mark.parametrize("part", [0.9, 1.1, -0.9, -1.1])
    @BOTH_WAYS
    def test_half_a_unit_in_the_last_place_is_allowed_and_no_more(self, swap, name, part):
        off = own().steps[1].model_dump()[name]
        moved = (off[0] + part * 5e-5,) if name == "lr" else off + part * 5e-5
        other = foreign(change={(2, name): moved}, precision={name: Precision(decimals=4)})
        comparison = held(own(), other, swap)
        assert comparison.equal is (abs(part) < 1)
        assert told(comparison, f"wrote {name} with 4 decimals")
        assert not held(own(), foreign(change={(2, name): moved}), swap).equal

    def test_both_sides_may_have_few_digits(self):
        few = {"precision": {"loss": Precision(decimals=3)}}
        a, b = foreign(**few), foreign(change={(2, "loss"): LOSS[2] + 9e-4}, **few)
        assert compare(a, b, REASSOCIATED).equal
        assert not compare(a, foreign(change={(2, "loss"): LOSS[2] + 9e-4}), REASSOCIATED).equal

    @given(st.floats(1e-3, 10.0), st.integers(2, 6), st.floats(-3, 3))
    @example(9.048006222416534, 5, -2.0625)
    def test_a_rounded_loss_equals_the_loss_that_was_rounded_and_not_one_two_units_off(self, loss, decimals, units):
        off = loss + units * 10.0**-decimals
        other = foreign(steps=[1], change={(1, "loss"): round(off, decimals)}, precision={"loss": Precision(decimals)})
        found = compare(own([1], loss=loss), other, REASSOCIATED).equal
        assert found or abs(units) > 1e-9
        # Rounding twice leaves a unit, and sums over 4 rollouts in fp32 a share of 1.3113e-6 (`Comparison.bound`).
        assert not found or abs(units) < 1.01 + 1.32e-6 * max(loss, 0.5) * 10.0**decimals

    def test_a_rounding_that_errs_to_one_side_in_every_step_is_no_bias_and_more_is(self):
        steps = range(1, 31)
        few = {"precision": {"grad_norm": Precision(decimals=4)}}
        assert compare(
            own(steps), foreign(steps, change={(s, "grad_norm"): 2.00004 for s in steps}, **few), REASSOCIATED
        ).equal
        bias = foreign(steps, change={(s, "grad_norm"): 2.0 + 3e-6 * (1 + s % 2 / 9) for s in steps})
        assert (None, "grad_norm, mean") in fields(compare(own(steps), bias, REASSOCIATED))

    @pytest.mark.parametrize("name", ["lr", "loss"])
    def test_digits_so_few_that_they_prove_little_are_said(self, name):
        assert told(compare(own(), foreign(precision={name: Precision(decimals=0)}), REASSOCIATED), "proves little")
        assert not told(compare(own(), foreign(precision={name: Precision(decimals=7)}), REASSOCIATED), "proves little")

    def test_an_infinite_loss_is_not_excused(self):
        other = foreign(change={(2, "loss"): math.inf}, precision={"loss": Precision(decimals=4)})
        assert (2, "loss") in fields(compare(own(), other, REASSOCIATED))
        assert (2, "loss") in fields(compare(other, own(), REASSOCIATED))

    def test_a_reference_of_zero_excuses_half_a_unit_only(self):
        few = {"precision": {"grad_norm": Precision(decimals=2)}}
        for norm, equal in ((0.004, True), (0.006, False)):
            other = foreign(change={(step, "grad_norm"): 0.0 for step in (1, 2, 3)}, **few)
            assert compare(other, own(grad_norm=norm), REASSOCIATED).equal is equal

    def test_the_exact_tier_widens_nothing(self):
        other = foreign(change={(2, "loss"): LOSS[2] + 1e-9}, precision={"loss": Precision(decimals=4)})
        assert fields(compare(own(), other, EXACT)) == [(2, "loss")]

    def test_what_is_measured_stands_beside_the_widened_bound(self):
        other = foreign(change={(2, "loss"): LOSS[2] + 4e-5}, precision={"loss": Precision(decimals=4)})
        loss = next(it for it in compare(own(), other, REASSOCIATED).measured if it.field == "loss")
        assert (loss.step, loss.difference) == (2, pytest.approx(2e-5))
        assert loss.difference <= loss.bound < 3e-5


def rounded(values, decimals=4, field="loss"):
    """A trace of some values of a field, one a step, as its trainer rounds them."""
    change = {(step, field): round(value, decimals) for step, value in enumerate(values, 1)}
    return foreign(range(1, len(values) + 1), change=change, precision={field: Precision(decimals=decimals)})


class TestOneGrid:
    """Both traces were rounded to the same places: equal numbers come out equal, and near ones nearly always."""

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (Precision(significant=1), Precision(significant=1)),
            (Precision(decimals=5), Precision(decimals=5)),
            (Precision(significant=1), Precision(decimals=5)),
        ],
    )
    @BOTH_WAYS
    def test_learning_rates_one_step_ahead_differ_in_every_step(self, swap, a, b):
        steps = range(1, 9)
        one = foreign(steps, change={(s, "lr"): (s * 1e-5,) for s in steps}, precision={"lr": a})
        ahead = foreign(steps, change={(s, "lr"): ((s + 1) * 1e-5,) for s in steps}, precision={"lr": b})
        comparison = held(one, ahead, swap)
        assert fields(comparison) == [(step, "lr") for step in steps]
        assert "must be equal, because both traces rounded it alike" in comparison.first.why
        assert held(one, one, swap).equal
        assert told(held(one, one, swap), "held to be equal")

    def test_single_precision_beside_the_digits_is_left_open(self):
        lr = 2.9999999242136255e-05  # the single next to 3e-5
        few, single = Precision(decimals=5), Precision(decimals=5, single=True)
        one = foreign(change={(s, "lr"): (3e-5,) for s in (1, 2, 3)}, precision={"lr": few})
        assert compare(
            one, foreign(change={(s, "lr"): (lr,) for s in (1, 2, 3)}, precision={"lr": single}), REASSOCIATED
        ).equal

    @pytest.mark.parametrize("swing", [1, -1])
    @BOTH_WAYS
    def test_norms_a_unit_apart_in_every_step_differ_whatever_their_side(self, swap, swing):
        norms = [0.5, 1.0] * 20
        moved = [norm + 0.1 * swing**step for step, norm in enumerate(norms)]
        a, b = (rounded(it, 1, "grad_norm") for it in (norms, moved))
        comparison = held(a, b, swap)
        assert (None, "grad_norm, rounded") in fields(comparison)
        assert all(step is None for step, _ in fields(comparison))
        assert "rounded alike in both traces" in comparison.differences[-1].why

    @pytest.mark.parametrize("decimals", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("kind", ["noisy", "smooth", "slow", "still"])
    @BOTH_WAYS
    def test_runs_that_rounding_parted_before_they_were_written_are_equal(self, swap, kind, decimals):
        rng = random.Random(f"{kind} {decimals}")
        for _ in range(20):
            start, count = rng.uniform(0.5, 4.0), rng.choice([3, 30, 300])
            fall = {"noisy": 0.0, "smooth": 1e-3, "slow": 3e-7, "still": 0.0}[kind]
            noise = 0.3 if kind == "noisy" else 0.0
            losses = [start - fall * step + rng.uniform(-noise, noise) for step in range(count)]
            others = [it * (1 + 1.5e-7 * rng.uniform(-1, 1)) for it in losses]  # a quarter of the least bound
            comparison = held(rounded(losses, decimals), rounded(others, decimals), swap)
            assert comparison.equal, comparison.first

    def test_a_number_that_no_longer_moves_may_lie_at_a_half_in_every_step(self):
        losses = [2.34565 + 1e-7 * (-1) ** step for step in range(60)]
        assert {round(it, 4) for it in losses} == {2.3456, 2.3457}
        assert compare(rounded(losses), rounded(losses[::-1]), REASSOCIATED).equal

    @BOTH_WAYS
    def test_a_mean_of_rounded_losses_is_not_rounded_itself(self, swap):
        rng = random.Random(7)
        # Of each four, three are rounded down and one up: their mean ends in 25, and they have one that is rounded up.
        losses = [rng.randrange(100, 300) / 100 + (0.006, 0.0049, 0.0049, 0.0049)[step % 4] for step in range(200)]

        def logged(every):
            ends = range(every, 201, every)
            change = {(end, "loss"): round(math.fsum(losses[end - every : end]) / every, 2) for end in ends}
            return foreign(ends, change=change, precision={"loss": Precision(decimals=2)}, mean_loss=True)

        assert held(logged(1), logged(4), swap).equal

    def test_what_digits_leave_open_of_the_lr_is_measured_and_said(self):
        one = foreign(change={(s, "lr"): (s * 1e-5,) for s in (1, 2, 3)}, precision={"lr": Precision(decimals=5)})
        other = foreign(change={(s, "lr"): (s * 1.2e-5,) for s in (1, 2, 3)})
        comparison = compare(one, other, REASSOCIATED)
        (lr,) = [it for it in comparison.measured if it.field == "lr"]
        assert (lr.difference, lr.bound) == (
            pytest.approx(0.2),
            pytest.approx(0.5 / 3, rel=0.3) if lr.step == 3 else 0.5,
        )
        (little,) = comparison.proves_little
        assert "5 decimals of lr leave open up to 0.5 of it" in little


class TestSteps:
    @BOTH_WAYS
    def test_steps_between_those_logged_are_left_out_and_said(self, swap):
        comparison = held(own(range(1, 31)), foreign(range(10, 31, 10)), swap)
        assert comparison.equal
        assert [row.step for row in comparison.rows] == [10, 20, 30]
        assert told(comparison, "logs one step in 10: 27 steps that it does not log are left out")
        assert told(comparison, "--mean-loss")

    @pytest.mark.parametrize(
        ("logged", "missing"),
        [
            ([1, 2, 4, 5], [3]),
            ([1, 2, 3], [4, 5]),
            ([3, 4, 5], [1, 2]),
            ([10, 20, 40, 50], [30]),
            ([10, 20, 30], [40, 50]),
            ([30, 40, 50], [10, 20]),
            ([1, 10, 20, 30, 40, 50], []),
            ([10, 20, 30, 40, 50, 52], []),
        ],
    )
    @BOTH_WAYS
    def test_a_step_that_was_due_and_is_missing_is_a_difference(self, swap, logged, missing):
        last = 5 if logged[0] < 10 and len(logged) < 6 else 52
        comparison = held(own(range(1, last + 1)), foreign(logged), swap)
        assert fields(comparison) == [(step, "step") for step in missing]

    @BOTH_WAYS
    def test_a_step_that_only_the_foreign_trace_has_is_a_difference(self, swap):
        assert fields(held(own(range(1, 25)), foreign(range(10, 41, 10)), swap)) == [(30, "step"), (40, "step")]

    @BOTH_WAYS
    def test_our_own_missing_steps_are_never_excused(self, swap):
        assert fields(held(own(range(1, 31)), own(range(10, 31, 10)), swap))[0][1] == "step"

    @BOTH_WAYS
    def test_one_logged_step_leaves_out_as_many_as_the_trainer_says(self, swap):
        assert fields(held(own(range(1, 11)), foreign([10]), swap)) == [(step, "step") for step in range(1, 10)]
        assert held(own(range(1, 11)), foreign([10], every=10), swap).equal

    @BOTH_WAYS
    def test_two_foreign_traces_that_never_log_the_same_step_are_not_equal(self, swap):
        comparison = held(foreign([10, 20, 30]), foreign([15, 25]), swap)
        assert not comparison.equal

    @pytest.mark.parametrize(("logged", "every"), [([1, 2, 4], 1), ([5, 10, 20, 30], 10), ([3, 7], 4), ([9], 1)])
    def test_the_stride_is_the_distance_of_most_steps_and_of_two_the_lesser(self, logged, every):
        assert stride(foreign(logged)) == every

    @given(st.sets(st.integers(1, 60), min_size=2, max_size=12), st.integers(1, 60))
    def test_no_step_is_left_out_that_is_a_whole_number_of_strides_from_the_one_before(self, logged, last):
        other = foreign(sorted(logged))
        kept = {record.step for record in align(own(range(1, last + 1)), other).reference.steps}
        for step in set(range(1, last + 1)) - logged:
            before = max((it for it in logged if it < step), default=min(logged))
            assert (step in kept) is ((step - before) % stride(other) == 0)
        assert logged & set(range(1, last + 1)) <= kept


class TestMeanLoss:
    @pytest.mark.parametrize("every", [2, 5, 10])
    @BOTH_WAYS
    def test_a_mean_is_held_against_the_mean_of_the_same_steps(self, swap, every):
        logged = range(every, 31, every)
        comparison = held(own(range(1, 31)), foreign(logged, change=means(every, 30), mean_loss=True), swap)
        assert comparison.equal
        assert told(comparison, "is the mean over the steps since the one logged before")
        assert not told(comparison, "--mean-loss")
        assert not held(own(range(1, 31)), foreign(logged, change=means(every, 30)), swap).equal

    @BOTH_WAYS
    def test_a_loss_that_is_wrong_between_two_logged_steps_is_seen(self, swap):
        wrong = means(10, 30)
        wrong[20, "loss"] += 0.01 / 10
        comparison = held(own(range(1, 31)), foreign(range(10, 31, 10), change=wrong, mean_loss=True), swap)
        assert fields(comparison)[0] == (20, "loss")

    @BOTH_WAYS
    def test_a_first_step_that_is_logged_by_itself_shortens_the_next_mean(self, swap):
        change = {**means(10, 30), (10, "loss"): math.fsum(LOSS[step] for step in range(2, 11)) / 9}
        assert held(own(range(1, 31)), foreign([1, 10, 20, 30], change=change, mean_loss=True), swap).equal

    @BOTH_WAYS
    def test_two_traces_of_means_are_held_over_the_longer_one(self, swap):
        fine = foreign(range(5, 31, 5), change=means(5, 30), mean_loss=True)
        coarse = foreign(range(10, 31, 10), change=means(10, 30), mean_loss=True)
        assert held(fine, coarse, swap).equal
        assert held(fine, fine, swap).equal

    @BOTH_WAYS
    def test_a_mean_over_steps_that_the_other_lacks_is_a_difference_with_its_reason(self, swap):
        coarse = foreign(range(10, 31, 10), change=means(10, 30), mean_loss=True)
        comparison = held(own(range(5, 31)), coarse, swap)
        assert fields(comparison) == [(10, "loss")]
        assert told(comparison, "at step 10 a mean loss needs steps that the")

    @BOTH_WAYS
    def test_a_run_that_was_resumed_has_its_first_mean_over_as_many_steps_as_the_next(self, swap):
        late = foreign([20, 30], change=means(10, 30), mean_loss=True)
        assert held(own(range(11, 31)), late, swap).equal

    @BOTH_WAYS
    def test_means_over_steps_that_do_not_begin_together_are_held_over_those_that_do(self, swap):
        """Tens and fours meet at step 20 and at step 40: the mean of all steps up to 20, and of those behind it."""
        tens = foreign(range(10, 41, 10), change=means(10, 40), mean_loss=True)
        fours = foreign(range(4, 41, 4), change=means(4, 40), mean_loss=True)
        aligned = align(fours, tens) if swap else align(tens, fours)
        for side in (aligned.reference, aligned.candidate):
            losses = {one.step: one.loss for one in side.steps}
            assert losses[20] == pytest.approx(math.fsum(LOSS[step] for step in range(1, 21)) / 20)
            assert losses[40] == pytest.approx(math.fsum(LOSS[step] for step in range(21, 41)) / 20)
        assert held(tens, fours, swap).equal
        wrong = {**means(4, 40), (28, "loss"): means(4, 40)[28, "loss"] + 0.01}
        off = foreign(range(4, 41, 4), change=wrong, mean_loss=True)
        assert fields(held(tens, off, swap))[0] == (40, "loss")

    @BOTH_WAYS
    def test_means_that_begin_together_nowhere_are_a_difference_with_its_reason(self, swap):
        comparison = held(foreign(range(15, 36, 10), mean_loss=True), foreign(range(7, 36, 4), mean_loss=True), swap)
        assert (15, "loss") in fields(comparison)
        assert told(comparison, "a mean loss needs steps that the")

    def test_nan_in_the_middle_makes_the_mean_nan(self):
        steps = own(range(1, 31)).steps
        bad = Trace(OWN, (*steps[:4], steps[4].model_copy(update={"loss": math.nan}), *steps[5:]))
        comparison = compare(bad, foreign(range(10, 31, 10), change=means(10, 30), mean_loss=True), REASSOCIATED)
        assert (10, "loss") in fields(comparison)

    def test_a_mean_over_one_step_is_the_loss_itself(self):
        aligned = align(own(), foreign(mean_loss=True))
        assert aligned.reference.steps == own().steps
        assert aligned.notes == ()


class TestTerms:
    def test_rollouts_of_steps_that_are_left_out_count(self):
        aligned = align(own(range(1, 31)), foreign(range(10, 31, 10)))
        assert aligned.terms[30] == 120
        assert [record.step for record in aligned.reference.steps] == [10, 20, 30]

    def test_the_candidates_rollouts_are_taken_where_the_reference_has_none_and_steps_where_neither_has(self):
        backwards = align(foreign(), own())
        assert backwards.terms == {1: 4, 2: 8, 3: 12}
        assert any("those of the candidate" in note for note in backwards.notes)
        neither = align(foreign([10, 20]), foreign([10, 20]))
        assert neither.terms == {10: 1, 20: 11}
        assert any("each step is taken for one" in note for note in neither.notes)

    def test_our_own_traces_go_through_unchanged(self):
        a, b = own(), own(range(2, 6))
        aligned = align(a, b)
        assert (aligned.reference, aligned.candidate, aligned.notes) == (a, b, ())
        assert aligned.terms == {1: 4, 2: 8, 3: 12, 4: 12, 5: 12}
