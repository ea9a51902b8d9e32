"""An update with less of the one before: a state that was lost, or another momentum; the step behind it tells."""

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose, grouped
from ds_parity.trace import Trace
from tests.parity.test_diagnosis_of_weights import MOMENTUM, START, STEPS, Run, started, with_momentum

BOTH = {"resume-loses-optimizer", "momentum"}


def other_momentum(momentum, since):
    class Other(Run):
        def state(self, at, buffer):
            return buffer * (momentum / MOMENTUM if at >= since else 1.0)

    return Other


def lost_state(since):
    class Lost(Run):
        def state(self, at, buffer):
            return buffer * (at != since)

    return Lost


def named(fault, *, steps=STEPS):
    a, b = (started(run, START) for run in (Run, fault))
    a, b = (Trace(it.header, it.steps[:steps]) for it in (a, b))
    causes = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    assert len(grouped(causes)) == 1
    return {cause.name for cause in causes}


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("momentum", [0.8, 0.5, 0.0, 0.95])
def test_another_momentum_is_no_lost_state(momentum, since):
    assert named(other_momentum(momentum, since)) == {"momentum"}


def test_a_momentum_near_one_in_place_of_none_keeps_no_gradients_where_norms_agree():
    """Gradients that are not set to zero are longer."""
    a, b = (started(with_momentum(Run, momentum), START) for momentum in (0.0, 0.99))
    causes = diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes
    assert {cause.name for cause in causes} == {"momentum"}


@pytest.mark.parametrize("since", [1, 3])
def test_a_lost_state_is_no_other_momentum(since):
    assert named(lost_state(since)) == {"resume-loses-optimizer"}


@pytest.mark.parametrize("fault", [other_momentum(0.8, 3), other_momentum(0.0, 3), lost_state(3)])
def test_both_are_named_where_no_step_is_behind_it(fault):
    assert named(fault, steps=4) == BOTH


def test_more_of_the_update_before_is_no_lost_state_in_the_last_step_either():
    assert named(other_momentum(0.95, 3), steps=4) == {"momentum"}


def averaged(share, at_step):
    """Weights that are once averaged with those of the step before: they move back by a share of its update."""

    class Averaged(Run):
        def trace(self):
            self.updates = []
            return super().trace()

        def after(self, at, weights, before):
            self.updates.append(weights - before)
            return weights - (share * self.updates[at - 1] if at == at_step else 0.0)

    return Averaged


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_weights_that_move_back_once_are_no_momentum(share, at, momentum):
    """The next update is whole."""
    a, b = (started(with_momentum(run, momentum), START) for run in (Run, averaged(share, at)))
    diagnosis = diagnose(a, b, compare(a, b, Tier.REASSOCIATED))
    assert not BOTH & {cause.name for cause in diagnosis.causes}
    assert "weights" in diagnosis.classes


@pytest.mark.parametrize("name", ["lost", "averaged"])
def test_a_rate_that_is_not_recorded_behind_it_is_about_that_before(name):
    fault, right = {"lost": (lost_state(3), {"resume-loses-optimizer"}), "averaged": (averaged(0.5, 3), set())}[name]
    a, b = (started(run, START) for run in (Run, fault))
    steps = tuple(it.model_copy(update={"lr": None}) if it.step == 5 else it for it in b.steps)
    found = diagnose(a, Trace(b.header, steps), compare(a, Trace(b.header, steps), Tier.REASSOCIATED))
    assert {cause.name for cause in found.causes} == right
