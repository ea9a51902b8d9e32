"""No step holds a second copy of the gradients, and one that did would be seen on every stage."""

from itertools import product

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_parity.engine.ranks.hostsum import CAPACITY
from ds_parity.parity.running.tasks import attempt_scenario
from tests.distributed import cells
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CASES = [*product(cells.STAGES, cells.DTYPES)]


@at_length_on_two_ranks
def peaks(folder):
    """By case: ds_parity, the engine driven by hand, and ds_parity with a copy that lives during the step."""
    return {name(*case): _peaks(cells.ragged(*case, "token").to_json(), str(folder)) for case in CASES}


def name(stage, dtype):
    """The key of a case."""
    return f"{stage}-{dtype}"


def _peaks(scenario, folder):
    results = {
        engine: attempt_scenario(scenario, engine, folder, measured=True) for engine in ("ds_parity", "deepspeed-loop")
    }
    unwatched = DeepSpeedEngine._take_model_step
    DeepSpeedEngine._take_model_step = _copying
    try:
        results["copying"] = attempt_scenario(scenario, "ds_parity", folder, measured=True)
    finally:
        DeepSpeedEngine._take_model_step = unwatched
    return results


def _copying(engine, *args, _step=DeepSpeedEngine._take_model_step, **kwargs):
    kept = getattr(engine.optimizer, "averaged_gradients", None) or {}
    copy = [gradient.clone() for group in kept.values() for gradient in group or []]
    copy += [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
    assert sum(gradient.numel() for gradient in copy) > 10_000
    return _step(engine, *args, **kwargs)


# The step sums loss and metrics while gradients are there: measured, 112 to 1,212 bytes more. Of these
# 8 * CAPACITY are room for another rank's message, whatever the model's size.
MESSAGE = 8 * CAPACITY + 200


@pytest.mark.parametrize(("stage", "dtype"), CASES)
class TestAStep:
    def test_holds_what_the_engine_driven_by_hand_holds(self, two_ranks_at_length, stage, dtype):
        result = two_ranks_at_length.of(peaks)[name(stage, dtype)]
        candidate, by_hand = result["ds_parity"]["peaks"], result["deepspeed-loop"]["peaks"]
        assert len(candidate) == 2
        assert min(candidate) - min(by_hand) < MESSAGE

    def test_that_copies_its_gradients_is_seen(self, two_ranks_at_length, stage, dtype):
        result = two_ranks_at_length.of(peaks)[name(stage, dtype)]
        size = result["ds_parity"]["parameters"] * (4 if dtype == "fp32" else 2)
        extra = min(result["copying"]["peaks"]) - min(result["ds_parity"]["peaks"])
        assert extra == pytest.approx(size / (1 if stage == 0 else 2), rel=0.01, abs=MESSAGE)
