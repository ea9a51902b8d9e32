"""What a window costs beside the bare engine's: collectives, and reads of tensors that wait for the accelerator."""

import pytest

from tests.distributed.cells import STAGES, config
from tests.distributed.counting import Counting
from tests.distributed.engines import Batch, build, exchanges_of, forward, let_go, one_pass
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def overhead(folder):
    """Collectives and reads of device tensors in a window of 6 passes, beside the bare engine."""
    results = {}
    for stage in STAGES:
        engine = build(config(stage, passes=12))
        for index in range(6):
            one_pass(engine, index)
        with Counting() as counted:
            before = exchanges_of(engine)
            for index in range(6):
                one_pass(engine, index)
        bare = let_go(engine)
        with Counting() as theirs:
            for index in range(6):
                bare.set_gradient_accumulation_boundary(index == 5)
                bare.backward(forward(bare, index) / 6, scale_wrt_gas=False)
                bare.step()
        ahead = build(config(stage, passes=12, lookahead=6))
        for _ in ahead.passes([Batch() for _ in range(6)]):
            one_pass(ahead, 1)
        results[stage] = {
            "exchanges": exchanges_of(engine) - before,
            "ds_parity": counted.counts,
            "bare": theirs.counts,
            "ahead": exchanges_of(ahead),
        }
    return results


class TestOverhead:
    def test_one_host_collective_a_pass(self, two_ranks, stage):
        assert two_ranks.of(overhead)[stage]["exchanges"] == 6

    def test_with_look_ahead_one_for_all_its_passes_and_two_to_end(self, two_ranks, stage):
        """Six passes, the answer that all streams are dry, and that all ranks finish."""
        assert two_ranks.of(overhead)[stage]["ahead"] == 3

    def test_no_tensor_is_read_that_the_bare_engine_does_not_read(self, two_ranks, stage):
        """Reading a tensor of the accelerator waits for it."""
        result = two_ranks.of(overhead)[stage]
        reads = ("item", "__bool__", "__float__", "__int__")
        assert {name: result["ds_parity"][name] for name in reads} == {name: result["bare"][name] for name in reads}

    def test_collectives_beyond_the_bare_engine_are_the_exchanges_and_one_for_the_loss(self, two_ranks, stage):
        result = two_ranks.of(overhead)[stage]
        more = {name: result["ds_parity"][name] - count for name, count in result["bare"].items()}
        assert {name: count for name, count in more.items() if count} == {"isend": 6 + 1, "irecv": 6 + 1}
