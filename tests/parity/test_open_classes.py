"""The classes that are left open contain that of the fault, and certain is only what the record shows."""

import hashlib
import re

import numpy as np
import pytest

from ds_parity.trace import Trace, Weights
from ds_parity.trace.records import Start
from tests.parity.test_forgotten_lengths import RATE, STEPS, adam, found, run, sgd, times
from tests.parity.test_wide_bounds import elsewhere, turned
from tests.parity.test_without_weights import OF_UPDATE

PLAIN = {"update": lambda gradients: sgd(gradients, momentum=0.0)}
OPTIMIZERS = {
    "SGD": PLAIN,
    "SGD with momentum": {},
    "SGD with momentum and decay": {"decay": 0.01},
    "AdamW": {"update": adam, "optimizer": "AdamW"},
}


def rewritten(trace, change):
    """The same run with other values in its log: `change` returns them by step number, None to leave a step out."""
    changed = [(one, change(one.step)) for one in trace.steps]
    return Trace(trace.header, tuple(one.model_copy(update=new) for one, new in changed if new is not None))


def without_weights(trace):
    return rewritten(trace, lambda number: {"weights": None})


@pytest.mark.parametrize("lost", [1, 3, STEPS])
def test_a_step_that_is_not_logged_may_have_been_taken(lost):
    one = run()
    other = rewritten(one, lambda number: None if number == lost else {})
    for pair in ((one, other), (other, one), (without_weights(one), without_weights(other))):
        assert "logging" in found(*pair).classes


def test_steps_that_are_numbered_otherwise_may_be_the_same():
    one = run()
    later = rewritten(one, lambda number: {"step": number + 2})
    assert {"data", "gradient", "logging"} <= set(found(one, later).classes)
    trained = rewritten(run(scale=lambda at, g: 1.3 * g), lambda number: {"step": number + 2})
    assert "logging" not in found(one, trained).classes


def test_a_step_that_is_called_skipped_was_taken_where_weights_are_the_same():
    one = run()
    for others in ({}, {"grad_norm": None}):
        diagnosis = found(
            one, rewritten(one, lambda number, new=others: {"skipped": True, **new} if number == 3 else {})
        )
        assert diagnosis.classes == ("logging",)
        assert diagnosis.causes == diagnosis.not_excluded == ()
        assert "how each run computes and writes" in diagnosis.next


def test_a_step_that_is_called_skipped_may_have_been_taken_where_weights_do_not_tell():
    """Without weights, in a first step, and in one that moves nothing; with other weights it was not."""

    def skipped(trace, at):
        return rewritten(trace, lambda number: {"skipped": True} if number == at else {})

    one, still = run(), run(rates=[RATE, RATE, 0.0, *[RATE] * (STEPS - 3)])
    for right, wrong in (
        (without_weights(one), skipped(without_weights(one), 3)),
        (one, skipped(one, 1)),
        (still, skipped(still, 3)),
    ):
        assert {"loss", "gradient", "logging"} == set(found(right, wrong).classes)
    lost = run(scale=lambda at, g: 1e-9 * g if at == 2 else g)
    assert "logging" not in found(one, skipped(lost, 3)).classes


@pytest.mark.parametrize("first", [1, 4])
def test_weights_that_one_side_does_not_record_are_no_other_training(first):
    one = run()
    for pair in (
        (one, gone := rewritten(one, lambda number: {"weights": None} if number >= first else {})),
        (gone, one),
    ):
        diagnosis = found(*pair)
        assert diagnosis.classes == ("logging",)
        assert any(said.startswith("not recorded by both sides") and "weights" in said for said in diagnosis.certain)
        assert "record weights in both runs" in diagnosis.next


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at_all", [True, False])
def test_a_gradient_of_the_same_norm_may_be_another(optimizer, at_all):
    """Negated in all steps or in one, or with its numbers in other places; a rate turns no update."""
    options = OPTIMIZERS[optimizer]
    one = run(**options)
    for other in (lambda g: -g, lambda g: np.roll(g, 7)):
        wrong = run(**options, scale=lambda at, g, other=other: other(g) if at_all or at == 3 else g)
        diagnosis = found(one, wrong)
        assert diagnosis.certain[0].startswith(f"first to differ, in step {1 if at_all else 4}: weights")
        assert "gradient" in diagnosis.classes
        assert "schedule" not in diagnosis.classes
        assert not [said for said in diagnosis.certain if re.search("(have|in) the reference's direction", said)]


def test_updates_in_the_opposite_direction_are_said_to_be_so():
    for optimizer in ("SGD", "SGD with momentum", "AdamW"):
        options = OPTIMIZERS[optimizer]
        said = found(run(**options), run(**options, scale=lambda at, g: -g)).certain
        expected = "the updates have the opposite of the reference's direction, and 1, 1, 1, 1, 1 times its length"
        assert f"from step 1 on {expected}" in said
    turns = run(**PLAIN, scale=lambda at, g: g * (-1) ** at, rates=[3 * RATE] * STEPS)
    said = found(run(**PLAIN), turns).certain
    assert any("have the reference's direction or its opposite, and 3, 3, 3" in one for one in said), said


def test_an_update_that_is_longer_has_the_right_gradient():
    """By another rate than the logged one, as an optimizer's setting has it, or something that scales updates."""
    for options in OPTIMIZERS.values():
        classes = found(run(**options), run(**options, rates=[3 * RATE, *[RATE] * (STEPS - 1)])).classes
        assert "schedule" in classes
        assert "gradient" not in classes


def test_weights_alone_say_little_where_no_norm_was_recorded():
    one, other = (
        rewritten(run(scale=lambda at, g, by=by: by * g), lambda number: {"grad_norm": None}) for by in (1.0, 1.3)
    )
    assert {"loss", "gradient", "clipping", "optimizer settings", "schedule", "weights"} <= set(
        found(one, other).classes
    )


def stored_in_fp32(seed, times):
    """Two runs whose weights are rounded to fp32 after each step; in the second one a step is so many times as long."""
    draw, sides = np.random.default_rng(seed), ([], [])
    start = weights = draw.normal(size=500).astype(np.float32)
    signs = draw.choice([-1.0, 1.0], size=(32, len(start)))
    for number in range(1, STEPS + 1):
        gradient = draw.normal(size=len(start)) / len(start) ** 0.5
        before, weights = weights, (weights - RATE * gradient).astype(np.float32)
        other = weights if number < 3 else (before - times * RATE * gradient).astype(np.float32)
        for side, held in zip(sides, (weights, other), strict=True):
            exact = held.astype(np.float64)
            checksum = hashlib.sha256(held.tobytes()).hexdigest()
            summary = Weights(
                checksum=checksum, norm=float(np.linalg.norm(exact)), sketch=tuple((signs @ exact).tolist())
            )
            side.append(summary)
    one = run()
    header = one.header.model_copy(
        update={"start": Start(norm=float(np.linalg.norm(start)), sketch=tuple((signs @ start).tolist()), dtype="fp32")}
    )
    made = [[it.model_copy(update={"weights": w}) for it, w in zip(one.steps, side, strict=True)] for side in sides]
    return tuple(Trace(header, tuple(steps)) for steps in made)


@pytest.mark.parametrize("times", [0.3, 1.5, 2, 3, 10, 100])
def test_the_rounding_of_an_update_enters_a_longer_one_as_often(times):
    """It lies beside the update, and shows no other direction."""
    for seed in range(20):
        assert "schedule" in found(*stored_in_fp32(seed, times)).classes, seed


def on_policy(trace, loss=-0.125, weights=True):
    """The same run with one loss in every step, as a mean of advantages is where each token has the ratio 1."""
    return rewritten(trace, lambda number: {"loss": loss} if weights else {"loss": loss, "weights": None})


def begun(trace, moved, told):
    """The same run from weights that are moved in every direction, and other gradients there."""
    start = trace.header.start
    sketch = tuple(one + moved for one in start.sketch)
    header = trace.header.model_copy(update={"start": start.model_copy(update={"sketch": sketch}) if told else None})
    steps = rewritten(
        trace,
        lambda number: {
            "grad_norm": trace.steps[number - 1].grad_norm * 1.1,
            "weights": elsewhere(trace.steps[number - 1].weights, np.full(32, moved)),
        },
    ).steps
    return Trace(header, steps)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_another_start_is_named_where_no_loss_shows_it(steps):
    one = run()
    pair = [on_policy(Trace(it.header, it.steps[:steps])) for it in (one, begun(one, 50.0, told=True))]
    assert [cause.name for cause in found(*pair).causes] == ["initial-weights"]


def test_losses_that_are_the_same_whatever_the_weights_are_exclude_neither_weights_nor_data():
    one = run(told=False)
    pair = on_policy(one), on_policy(begun(run(), 50.0, told=False))
    assert {"weights", "data"} <= set(found(*pair).classes)
    lost = [rewritten(it, lambda number: {"loss": None} if number == 3 else {}) for it in pair]
    assert {"weights", "data"} <= set(found(*lost).classes)
    # In a loss that follows the weights one sees that both begin alike.
    longer = run(scale=lambda at, gradient: 1.3 * turned(at, gradient))
    assert not {"weights", "data"} & set(found(run(), longer).classes)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_losses_of_rounding_size_exclude_neither_weights_nor_data(steps):
    """Advantages that are normalised within a prompt add up to nothing."""
    pair = [
        on_policy(Trace(it.header, it.steps[:steps]), loss=1.4e-17, weights=False)
        for it in (run(told=False), begun(run(), 50.0, told=False))
    ]
    assert {"weights", "data"} <= set(found(*pair).classes)


def test_a_loss_of_nothing_in_the_first_step_alone_excludes_neither_weights_nor_data():
    """Behind it a term of the loss follows the weights."""
    pair = [
        rewritten(it, lambda number, times=times: {"loss": 1e-17 if number < 2 else times * number, "weights": None})
        for it, times in ((run(told=False), 1e-6), (begun(run(), 50.0, told=False), 3e-6))
    ]
    assert {"weights", "data"} <= set(found(*pair).classes)


@pytest.mark.parametrize("loss", [1.4e-17, -3e-9, -0.125])
def test_negated_advantages_that_add_up_to_nothing_leave_loss_and_data_open(loss):
    """Every token has the ratio 1: the loss is a mean of advantages, or rounding, and each norm is the right one."""
    pair = [on_policy(run(scale=times(by)), loss=loss) for by in (1.0, -1.0)]
    assert {"loss", "data", "gradient"} <= set(found(*pair).classes)
    pair = [run(scale=times(by), loss=lambda at: 0.5 + at) for by in (1.0, -1.0)]
    assert not {"loss", "data"} & set(found(*pair).classes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("told", [True, False])
def test_exchanged_answers_of_pairs_leave_loss_and_data_open(optimizer, told):
    """The first loss is ln 2 for either order, where the policy is still the reference's, and the norm is the same."""
    options, ln_2 = OPTIMIZERS[optimizer], 0.6931472
    pair = [
        run(**options, told=told, scale=times(by), loss=lambda at, by=by: ln_2 - 0.01 * by * at) for by in (1.0, -1.0)
    ]
    assert {"loss", "data", "gradient"} <= set(found(*pair).classes)


@pytest.mark.parametrize(
    ("losses", "open_too"), [((-0.1, 0.3), True), ((0.1, -0.3), True), ((0.1, 0.3), True), ((1.1, 0.9), False)]
)
def test_a_loss_that_is_no_cross_entropy_may_have_no_weights_in_its_first_step(losses, open_too):
    pair = [
        rewritten(it, lambda number, off=off: {"loss": losses[number > 1] + off * (number > 1), "weights": None})
        for it, off in ((run(told=False), 0.0), (begun(run(), 50.0, told=False), 1e-3))
    ]
    assert ("weights" in found(*pair).classes) == open_too


@pytest.mark.parametrize("steps", [1, STEPS])
def test_another_start_is_named_where_headers_alone_tell_of_weights(steps):
    """One factor of all norms has others beside it."""
    one = run()
    pair = [on_policy(Trace(it.header, it.steps[:steps]), weights=False) for it in (one, begun(one, 50.0, told=True))]
    assert found(*pair).causes[0].name == "initial-weights"
    by_no_factor = rewritten(pair[1], lambda number: {"grad_norm": one.steps[number - 1].grad_norm * (1 + number / 7)})
    names = [cause.name for cause in found(pair[0], by_no_factor).causes]
    assert names[0] == "initial-weights"
    assert steps == 1 or len(names) == 1


@pytest.mark.parametrize("loss", [1.4e-17, -0.125])
def test_one_start_in_the_headers_leaves_no_weights_open(loss):
    one, longer = run(), run(scale=lambda at, gradient: 1.3 * turned(at, gradient))
    pair = [on_policy(it, loss=loss, weights=False) for it in (one, longer)]
    assert "weights" not in found(*pair).classes


def shown(trace, **values):
    """The trace with other values of fields, as functions of the step's number; what a run does not log is None."""
    return rewritten(trace, lambda number: {name: value(number) for name, value in values.items()})


@pytest.mark.parametrize("at", [1, 3])
def test_other_data_are_open_where_no_loss_was_recorded(at):
    one = shown(without_weights(run(told=False)), loss=lambda number: None)
    other = rewritten(one, lambda number: {"grad_norm": 1.3 + number} if number >= at else {})
    assert {"data", "gradient", "weights", "logging"} <= set(found(one, other).classes)
    told = without_weights(run())
    other = rewritten(told, lambda number: {"grad_norm": 1.3 + number} if number >= at else {})
    assert "data" not in found(told, other).classes, "losses that agree to the last digit are of the same data"


@pytest.mark.parametrize("at", [1, 2])
def test_a_metric_may_show_an_update_that_a_loss_and_a_norm_do_not(at):
    def apart(trace):
        """A run whose losses and norms are off within their bounds from a step on, and its metric by much."""
        new = {"loss": lambda it: it.loss * (1 + 5e-7), "grad_norm": lambda it: it.grad_norm * (1 + 5e-7)}
        values = [{name: value(it) for name, value in new.items()} for it in trace.steps]
        return rewritten(trace, lambda n: {"metrics": {"kl": 0.0137 * n}, **values[n - 1]} if n >= at else {})

    one = shown(without_weights(run(told=False)), metrics=lambda number: {"kl": 0.01 * number})
    other = apart(one)
    assert found(one, other).certain[0].endswith(f"in step {at}: metrics")
    # An update lies in front of each step but the first.
    of_update = OF_UPDATE if at > 1 else {"weights"}
    assert {"data", "loss", "logging", *of_update} <= set(found(one, other).classes)
    told = shown(run(), metrics=lambda number: {"kl": 0.01 * number})
    other = apart(told)
    assert not OF_UPDATE & set(found(told, other).classes), "the weights agree"


@pytest.mark.parametrize("off", [0.0, 3e-6])
def test_a_start_that_is_off_by_rounding_is_open_where_the_loss_is_off_within_its_bound(off):
    one = without_weights(run(told=False))
    other = rewritten(
        one,
        lambda number: {
            "loss": one.steps[number - 1].loss * (1 + off),
            "grad_norm": one.steps[number - 1].grad_norm * (1 + 2e-5),
        },
    )
    diagnosis = found(one, other)
    assert ("weights" in diagnosis.classes) is (off > 0)
    assert diagnosis.certain[0].startswith("first to differ, in step 1: gradient norm")


def test_losses_that_agree_exclude_other_data_where_a_mean_over_all_norms_alone_differs():
    one = without_weights(run())
    for off in range(4, 40):
        other = rewritten(
            one, lambda number, off=off: {"grad_norm": one.steps[number - 1].grad_norm * (1 + off * 1e-7)}
        )
        diagnosis = found(one, other)
        if diagnosis.classes and not diagnosis.certain[0].startswith("first"):
            break
    assert not diagnosis.certain[0].startswith("first"), "no mean alone differs"
    assert "data" not in diagnosis.classes
