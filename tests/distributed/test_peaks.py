"""No step holds a second copy of the gradients, and one that did would be seen on every stage."""

import pytest

from tests.distributed.ranked_peaks import CASES, name

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("stage", "dtype"), CASES)
class TestAStep:
    def test_holds_what_the_engine_driven_by_hand_holds(self, two_ranks, stage, dtype):
        found = two_ranks.results["peaks"][name(stage, dtype)]
        ours, by_hand = found["ds_parity"]["peaks"], found["deepspeed-loop"]["peaks"]
        assert len(ours) == 2
        assert min(ours) - min(by_hand) < 100  # the exchange's own numbers

    def test_that_copies_its_gradients_is_seen(self, two_ranks, stage, dtype):
        found = two_ranks.results["peaks"][name(stage, dtype)]
        size = found["ds_parity"]["parameters"] * (4 if dtype == "fp32" else 2)
        extra = min(found["copying"]["peaks"]) - min(found["ds_parity"]["peaks"])
        assert extra == pytest.approx(size / (1 if stage == 0 else 2), rel=0.01)
