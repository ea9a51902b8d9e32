"""Weights that are far apart after the first step: of another start, or as far as that step takes them."""

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace import Trace
from tests.parity.test_forgotten_lengths import RATE, RNG, SIZE, STEPS, adam, run, sgd
from tests.parity.test_wide_bounds import elsewhere

DECAYING = [RATE * 0.1**at for at in range(STEPS)]
WARMED_UP = [RATE * at for at in range(STEPS)]
OPTIMIZERS = {"SGD": lambda gradients: sgd(gradients, momentum=0.0), "AdamW": adam}
ASIDE = RNG.normal(size=SIZE)


def trained(optimizer, rates, *, logged=True, **options):
    """A run that does not tell its start, and logs the rates that it has, or none."""
    trace = run(OPTIMIZERS[optimizer], optimizer, rates=rates, told=False, **options)
    lr = [(rate,) if logged else None for rate in rates]
    return Trace(trace.header, tuple(it.model_copy(update={"lr": lr[at]}) for at, it in enumerate(trace.steps)))


def moved(trace, shift):
    """The same run from other weights, whose loss they change."""
    steps = [
        it.model_copy(update={"weights": elsewhere(it.weights, shift), "loss": 1.1 * it.loss}) for it in trace.steps
    ]
    return Trace(trace.header, tuple(steps))


def named(a, b):
    return [cause.name for cause in diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_data_in_the_first_step_are_no_other_start_where_the_rate_decays(optimizer):
    """The updates behind it are short because their rates are."""

    def other(at, gradient):
        return np.linalg.norm(gradient) / np.linalg.norm(ASIDE) * ASIDE if at == 0 else gradient

    for logged in (True, False):
        one = trained(optimizer, DECAYING, logged=logged)
        two = trained(
            optimizer, DECAYING, logged=logged, scale=other, loss=lambda at: (0.5 + at) * (1.0 if at else 1.1)
        )
        assert "initial-weights" not in named(one, two)


@pytest.mark.parametrize("rates", [DECAYING, WARMED_UP, [RATE] * STEPS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_start_is_named_whatever_the_rates_are(optimizer, rates):
    one = trained(optimizer, rates)
    assert named(one, moved(one, np.full(32, 100.0))) == ["initial-weights"]
