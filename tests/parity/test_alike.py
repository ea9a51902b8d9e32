"""Where no cause is named, the known faults that are listed contain the one that was put in."""

import numpy as np
import pytest

from tests.parity.test_forgotten_lengths import GRADIENTS, RATE, START, STEPS, adam, found, run, sgd


def listed(wrong, right=None):
    diagnosis = found(right or run(), wrong)
    assert diagnosis.causes == (), diagnosis.causes
    return set(diagnosis.not_excluded)


def turned(at, g):
    """A gradient of another direction and another length."""
    return g + 0.5 * np.roll(g, 7)


def test_a_gradient_that_is_added_to_the_next_is_listed_from_the_second_step_on():
    kept = [sum(GRADIENTS[: at + 1]) for at in range(STEPS)]
    assert "gradient-not-zeroed" in listed(run(scale=lambda at, g: kept[at]))
    assert "gradient-not-zeroed" not in listed(run(scale=lambda at, g: kept[at] if at > 1 else g))


@pytest.mark.parametrize(("factor", "ranks_explain"), [(0.5, True), (2.0, False), (0.3, False)])
def test_a_factor_is_listed_where_later_norms_follow_other_weights(factor, ranks_explain):
    """A long learning rate takes weights apart, and norms off the factor with them."""
    drift = (1.0, 1.02, 1.1, 1.2, 1.3, 1.4)
    names = listed(run(adam, "AdamW", scale=lambda at, g: factor * drift[at] * g), run(adam, "AdamW", decay=0.01))
    assert {"constant-factor", "another-divisor"} <= names
    assert ("dp-mean-left-in" in names) == ranks_explain


def test_shares_of_micro_batches_are_listed_and_no_length_where_the_direction_is_another():
    names = listed(run(scale=turned))
    shares = {"rank-left-out", "first-passes-lost", "last-pass-lost", "weighed-by-another-unit", "running-total"}
    assert shares <= names
    assert not names & {"constant-factor", "another-divisor", "dp-mean-left-in"}


def test_what_one_pass_or_one_rank_cannot_have_is_not_listed():
    def alone(trace):
        header = trace.header.model_copy(update={"ranks": 1})
        steps = tuple(one.model_copy(update={"passes": 1}) for one in trace.steps)
        return type(trace)(header, steps)

    names = listed(alone(run(scale=turned)), alone(run()))
    assert "mean-of-micro-batches" in names
    assert not names & {"rank-left-out", "late-boundary", "last-backward-only", "first-passes-lost", "running-total"}


def test_a_decay_is_listed_whose_later_steps_are_too_far_off():
    """The share of each step is another, as where other weights have other gradients."""

    def off(at):
        return 0.01 * (1 - 0.05 * at) * START

    wrong = run(lambda gradients: [g + off(at) for at, g in enumerate(gradients)])
    names = listed(wrong, run(lambda gradients: sgd(gradients, momentum=0.0)))
    assert {"weight-decay", "weights-scaled-by-hand"} <= names
    assert not names & {"clip-at-wrong-scale", "implicit-clip", "lr-in-use"}


def test_a_negated_gradient_is_none_of_clipping_momentum_or_decay():
    for at_all in (True, False):
        wrong = run(scale=lambda at, g, at_all=at_all: -g if at_all or at == 3 else g)
        assert listed(wrong) == set()


def test_another_rate_is_listed_where_it_is_not_logged():
    wrong = run(adam, "AdamW", rates=[2 * RATE, *[RATE] * (STEPS - 1)])
    assert "lr-in-use" in listed(wrong, run(adam, "AdamW"))
