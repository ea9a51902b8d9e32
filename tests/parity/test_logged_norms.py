"""A gradient norm that is logged over the passes, and a gradient that is divided by them once more."""

import pytest

from ds_parity.parity.diagnosis import grouped
from ds_parity.trace import Trace
from tests.parity.test_forgotten_lengths import RATE, STEPS, adam, found, run, times
from tests.parity.test_without_weights import bare

PASSES = 4
OTHER = 3  # the first step of another fault
BOTH = {"gas-scaled-twice", "reported-norm"}
ADAM = {"update": adam, "optimizer": "AdamW"}
CLIPPED = {"limit": 0.1}  # a fourth of the shortest gradient is cut, too
LOGGED = {"logged": lambda at, norm: norm / PASSES}
DIVIDED = {"scale": times(1 / PASSES)}


def rates(*, since):
    """Rates that are twenty times as large from a step on."""
    return [RATE * (20 if at >= since else 1) for at in range(STEPS)]


def with_rates(used, **options):
    """A run that logs the rates that it has."""
    trace = run(rates=used, **options)
    return Trace(trace.header, tuple(it.model_copy(update={"lr": (used[it.step - 1],)}) for it in trace.steps))


def named(one, other):
    groups = grouped(found(one, other).causes)
    assert len(groups) == 1, groups
    return {cause.name for cause in groups[0]}


@pytest.mark.parametrize("options", [ADAM, {}])
def test_without_weights_a_factor_and_a_wrong_log_look_alike(options):
    assert named(bare(run(**options)), bare(run(**options, **LOGGED))) == BOTH


@pytest.mark.parametrize(("options", "names"), [({}, {"reported-norm"}), (ADAM, BOTH), (CLIPPED, BOTH)])
def test_weights_of_sgd_that_agree_exclude_a_factor(options, names):
    assert named(run(**options), run(**options, **LOGGED)) == names


@pytest.mark.parametrize(("options", "names"), [({}, {"reported-norm"}), (ADAM, BOTH), (CLIPPED, BOTH)])
@pytest.mark.parametrize("log", [True, False])
def test_weights_that_agree_up_to_another_fault_exclude_a_factor_too(options, names, log):
    """Another rate, in the log or behind its back."""
    one, doubled = with_rates(rates(since=STEPS), **options), rates(since=OTHER)
    for fault in (LOGGED, DIVIDED)[: len(names)]:
        both = {**options, **fault}
        assert named(one, with_rates(doubled, **both) if log else run(rates=doubled, **both)) == names


def test_a_rate_that_differs_first_behind_a_norm_tells_of_another_fault():
    """Of weights that agree in one step alone nothing is proved."""
    one = with_rates(rates(since=STEPS), told=False)
    assert named(one, with_rates(rates(since=1), told=False, **LOGGED)) == BOTH


def test_a_gradient_that_is_divided_twice_is_no_wrong_log():
    """By the weights, or by the losses that follow from them."""
    assert named(run(), run(**DIVIDED)) == {"gas-scaled-twice"}
    one, other = run(), run(**DIVIDED, loss=lambda at: (0.5 + at) * (1.1 if at else 1.0))
    assert named(bare(one), bare(other)) == {"gas-scaled-twice"}


def test_norms_that_only_the_bounds_of_more_steps_call_different_are_no_wrong_log():
    """As where momentum is another: norms creep apart, and losses behind them."""
    # Long norms in front of the third, and short ones behind it: what norms are relative to is less with all of them.
    one = bare(run(told=False), grad_norm=lambda step, norm: 4.0 if step < 3 else 1.0 if step == 3 else 0.5)
    reached = set()
    for off in range(50, 400, 2):
        steps = [
            it.model_copy(
                update={
                    "grad_norm": it.grad_norm * (1 + (off * 1e-8 if it.step == 3 else 1e-4)),
                    "loss": it.loss * (1 + (0.0 if it.step == 3 else 1e-4)),
                }
                if it.step > 2
                else {}
            )
            for it in one.steps
        ]
        diagnosis = found(one, Trace(one.header, tuple(steps)))
        assert "reported-norm" not in [cause.name for cause in diagnosis.causes], off
        reached.add(diagnosis.certain[0])
    assert any("in step 3: gradient norm" in said for said in reached)
    assert any("in step 4: loss" in said for said in reached)
