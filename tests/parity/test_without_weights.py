"""Without recorded weights an earlier update may have been another one, and norms prove only what they tell apart."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Trace
from ds_parity.trace.foreign import open_pair
from tests.parity.test_forgotten_lengths import STEPS, adam, run

OF_UPDATE = {"clipping", "optimizer settings", "schedule", "weights"}


def bare(trace, **changes):
    """The trace of a trainer that records no weights; changes by field, as functions of step and value."""
    steps = [
        it.model_copy(update={"weights": None, **{k: change(it.step, getattr(it, k)) for k, change in changes.items()}})
        for it in trace.steps
    ]
    return Trace(trace.header.model_copy(update={"start": None}), tuple(steps))


def norm(step):
    return 1.23456789 + 0.1234567 * (step * 7 % 5)


def opened(folder, steps, *sides):
    """Two logs as a trainer writes them: for a step, each side gives the learning rate and the gradient norm."""
    paths = folder / "a.jsonl", folder / "b.jsonl"
    for path, side in zip(paths, sides, strict=True):
        rows = [(step, 2.123456789 - 0.012345678 * step, *side(step)) for step in range(1, steps + 1)]
        line = '{{"step": {}, "loss": {}, "lr": {}, "grad_norm": {}}}\n'
        path.write_text("".join(line.format(*row) for row in rows))
    return open_pair(*paths)


def of(dtype, one, other):
    return diagnose(one, other, compare(one, other, Tier.REASSOCIATED, dtype))


@pytest.mark.parametrize("fields", [("loss", "grad_norm"), ("grad_norm",)])
@pytest.mark.parametrize("first", [2, 3, STEPS])
def test_a_later_difference_may_come_of_any_update_before_it(fields, first):
    """Another clipping, momentum, decay or rate in use shows in the loss of the next step, and nowhere before."""
    for update, optimizer in ((None, "SGD"), (adam, "AdamW")):
        one = run(**({"update": update} if update else {}), optimizer=optimizer)

        def later(number, value):
            return value * (1.01 if number >= first else 1.0)

        diagnosis = of("fp32", bare(one), bare(one, **dict.fromkeys(fields, later)))
        if not diagnosis.causes:
            assert set(diagnosis.classes) >= OF_UPDATE | {"gradient"}, diagnosis.classes
        # Where the weights were recorded, and agreed before, no update before it is left open.
        steps = [it.model_copy(update={"loss": later(it.step, it.loss)}) for it in one.steps]
        assert not OF_UPDATE & set(of("fp32", one, Trace(one.header, tuple(steps))).classes)


def test_the_first_step_has_no_update_before_it():
    one = run()
    wrong = bare(one, loss=lambda number, value: value * 1.01, grad_norm=lambda number, value: value * 1.02)
    assert not {"clipping", "schedule"} & set(of("fp32", bare(one), wrong).classes)


def test_some_known_faults_of_an_update_are_listed():
    one = run()
    later = {name: lambda number, value: value * (1.01 if number > 2 else 1.0) for name in ("loss", "grad_norm")}
    wrong = bare(one, **later)
    assert {"clip-at-wrong-scale", "weight-decay"} <= set(of("fp32", bare(one), wrong).not_excluded)
    # In the gradient norm alone, and where only the candidate has recorded no weights.
    norm = {"grad_norm": lambda number, value: value * (1.01 if number > 2 else 1.0)}
    for right, other in ((bare(one), bare(one, **norm)), (one, bare(one, **norm))):
        diagnosis = of("fp32", right, other)
        assert diagnosis.causes or {"clip-at-wrong-scale", "weight-decay"} <= set(diagnosis.not_excluded)


def test_norms_that_are_as_far_apart_as_losses_prove_no_wrong_log():
    """In bf16 a negated gradient keeps the norms within their bound, and takes the losses out of theirs."""
    one = run()
    for share, proved in ((0.019, False), (1e-5, True)):
        wrong = bare(
            one,
            loss=lambda number, value: value * 1.1,
            grad_norm=lambda number, value, by=share: value * (1 + by * (-1) ** number),
        )
        diagnosis = of("bf16", bare(one), wrong)
        named = {cause.name for group in grouped(diagnosis.causes) for cause in group}
        assert ("reported-loss" in named) is proved, (share, named)
        assert (set(diagnosis.classes) <= {"loss", "logging"}) is proved


def test_a_factor_may_be_the_number_of_ranks_where_it_is_not_recorded(tmp_path):
    one, other = opened(tmp_path, 12, lambda n: (0.001, norm(n)), lambda n: (0.001, 0.25 * norm(n)))
    causes = diagnose(one, other, compare(one, other, Tier.REASSOCIATED)).causes
    # Nor were the passes, or what DeepSpeed divides by, or weights, which would show a log that is off.
    alike = {"reported-norm", "dp-mean-left-in", "sp-factor-by-stage", "constant-factor", "gas-scaled-twice"}
    assert {cause.name for cause in grouped(causes)[0]} == alike
    assert causes[0].evidence.count("the number of ranks is not recorded") == 1
    assert ",," not in causes[0].evidence


def test_learning_rates_of_one_digit_are_what_they_are(tmp_path):
    """A rate that is halved every fifth step in one run, and every tenth in the other."""
    sides = [lambda n, every=every: (1e-3 * 0.5 ** ((n - 1) // every), norm(n)) for every in (5, 10)]
    found = compare(*opened(tmp_path, 16, *sides), Tier.REASSOCIATED)
    assert (found.first.step, found.first.field) == (6, "lr")


def test_the_number_of_ranks_is_known_where_both_sides_tell_it():
    one = run()
    for ranks in ((1, None), (None, 1), (1, 1)):
        sides = [
            Trace(it.header.model_copy(update={"ranks": count}), it.steps)
            for it, count in zip((bare(one), bare(one, grad_norm=lambda number, value: value / 4)), ranks, strict=True)
        ]
        named = {cause.name for cause in of("fp32", *sides).causes}
        assert ("dp-mean-left-in" in named) is (None in ranks), (ranks, named)


def test_one_digit_behind_an_exponent_is_rounded(tmp_path):
    """The same rates, in full and as `%.0e`: a log that says little, and nothing else."""
    sides = [lambda n, form=form: (form.format(1.1685e-05 * 0.93 ** (n - 1)), norm(n)) for form in ("{!r}", "{:.0e}")]
    found = compare(*opened(tmp_path, 12, *sides), Tier.REASSOCIATED)
    assert found.equal
    assert found.proves_little


@pytest.mark.parametrize("kl", [None, 1.0, 1.3])
def test_a_metric_that_differs_in_front_of_a_loss_does_not_prove_a_wrong_log(kl):
    """Another clipping: the loss is off by a little behind a few updates, and norms hardly show it."""

    def side(off, times):
        trace = bare(run(), loss=lambda n, loss: 1 / loss + off * (n > 2), grad_norm=lambda n, value: value + off / 1e4)
        shown = {} if times is None else {"metrics": times}
        return Trace(
            trace.header,
            tuple(
                it.model_copy(update={k: {"kl": 0.1 * it.step * by ** (it.step > 1)} for k, by in shown.items()})
                for it in trace.steps
            ),
        )

    diagnosis = of("fp32", side(0.0, kl and 1.0), side(1e-4, kl))
    assert diagnosis.causes == ()
    assert set(diagnosis.classes) >= OF_UPDATE


def test_losses_that_are_the_reference_s_but_for_a_little_are_no_moving_average():
    logged = (1.0, 0.5, 0.9, 0.6, 0.8, 0.7)
    for share, told in ((0.9, True), (1 - 1e-4, False)):
        smooth = [logged[0]]
        for loss in logged[1:]:
            smooth.append(share * loss + (1 - share) * smooth[-1])
        pair = [rewritten_losses(run(), of_side) for of_side in (logged, smooth)]
        said = of("fp32", *pair).causes[0].evidence
        assert ("moving average" in said) == told, said


def rewritten_losses(trace, losses):
    return Trace(trace.header, tuple(it.model_copy(update={"loss": losses[it.step - 1]}) for it in trace.steps))


@pytest.mark.parametrize("recorded", [True, False])
def test_weights_that_prove_nothing_make_no_wrong_log_of_a_kl(recorded):
    """Updates of half the length have a quarter of the KL, and lie within the bounds of bf16 elsewhere."""

    def side(part):
        one = run(rates=[part * 1e-3] * STEPS)
        steps = [
            it.model_copy(
                update={
                    "lr": (1e-3,),
                    "loss": 0.5 + 1e-4 * part * it.step,
                    "grad_norm": norm(it.step) + 1e-3 * part * (it.step - 1),
                    "metrics": {"kl": (part * (it.step - 1)) ** 2},
                }
            )
            for it in one.steps
        ]
        trace = Trace(one.header.model_copy(update={"start": None}), tuple(steps))
        return trace if recorded else bare(trace)

    diagnosis = of("bf16", side(1), side(0.5))
    assert not diagnosis.causes
    assert {"weights", "optimizer settings", "logging"} <= set(diagnosis.classes)


@pytest.mark.parametrize(("norms", "open_classes"), [(5e-3, OF_UPDATE), (1e-4, set())])
def test_a_wide_bound_of_norms_hides_the_update_that_a_loss_shows(norms, open_classes):
    """A loss near 0 is off by half of itself, and a norm within its bound: by a sixth of as much, or by far less."""

    def side(off):
        one = run()
        return bare(
            one,
            loss=lambda step, _: -0.03 * step * (1 + (0.5 * off if step > 2 else 0.0)),
            grad_norm=lambda step, _: norm(step) * (1 + (norms * off if step > 2 else 0.0)),
        )

    diagnosis = of("bf16", side(0), side(1))
    assert bool(diagnosis.causes) == (not open_classes)
    assert set(diagnosis.classes) & OF_UPDATE == open_classes
