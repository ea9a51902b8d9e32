"""With what coefficient did each micro-batch enter the step?"""

from dataclasses import replace

import numpy as np
import pytest

from ds_parity.parity.probe.decomposition import TOLERANCE
from ds_parity.parity.probe.probed_data import EVERYWHERE, SOMEWHERE, probed_data
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop
from tests.distributed.cells import RAGGED_CELLS, STAGES, TINY, config
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
NEVER_MARKED = "ds_parity.parity.subjects.controls.boundary.last_backward_only:LastBackwardOnly.run"


def probed(stage, dtype, weight):
    extended = config(stage, dtype, loss_weight=weight)
    return Scenario(f"probe-{stage}-{dtype}-{weight}", extended, shape="overshoot", windows=2, seed=3, **TINY)


def never_marked(stage):
    return Scenario(f"never-marked-{stage}", config(stage, passes=6), shape="uniform", windows=2, seed=3, **TINY)


for cell in RAGGED_CELLS:
    on_two_ranks.probe(probed(*cell))
for stage in STAGES:
    on_two_ranks.probe(never_marked(stage), NEVER_MARKED)


@pytest.mark.parametrize(("stage", "dtype", "weight"), RAGGED_CELLS)
def test_every_micro_batch_enters_with_its_weight_over_the_total(two_ranks, stage, dtype, weight):
    scenario = probed(stage, dtype, weight)
    result = two_ranks.probed(scenario)
    assert result.within(TOLERANCE[dtype]), result
    assert result.pattern == "as expected"
    assert any(0.0 in row for row in result.expected), "no idle pass was probed"


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_keep_the_last_backward_alone_where_the_boundary_is_never_marked(two_ranks, stage):
    result = two_ranks.probed(never_marked(stage), NEVER_MARKED)
    shares = np.array(result.measured) / np.array(result.expected)
    assert np.allclose(shares, [[0, 0], [0, 0], [1, 1]], atol=1e-5)
    assert "last-backward-only" in result.pattern
    assert not result.within(TOLERANCE["fp32"])


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_0_and_3_hide_that_fault(two_ranks, stage):
    """Why a test on these stages alone proves nothing about boundaries."""
    result = two_ranks.probed(never_marked(stage), NEVER_MARKED)
    assert result.within(TOLERANCE["fp32"])


class FirstLeftOut(Loop):
    """Leaves out the first micro-batch of every rank: its gradient is overwritten, or never computed."""

    def divided(self, loss, batch, index):
        return super().divided(loss, batch, index) * (index > 0)


class OneLeftOut(Loop):
    """Leaves out what the last rank has in the last pass of a window."""

    def divided(self, loss, batch, index):
        lost = index == self.window.last and self.rank == self.wanted.ranks - 1
        return super().divided(loss, batch, index) * (not lost)


class OtherLoss(Loop):
    """Computes the loss of other tokens: each is predicted from the one after the next."""

    def inputs(self, index):
        batch = super().inputs(index)
        return replace(batch, inputs={**batch.inputs, "input_ids": batch.inputs["input_ids"].flip(1)})


SEEDS = range(30)


def seeded(seed, data):
    base = Scenario("probe", config(2), shape="overshoot", windows=2, seed=seed, **TINY)
    return replace(probed_data(base)[data], name=f"probe of seed {seed}: {data}")


def subject(loop):
    return f"tests.distributed.test_probe:{loop.__name__}.run"


for seed in SEEDS:
    on_two_ranks.probe(seeded(seed, EVERYWHERE), subject(FirstLeftOut))
for data in (EVERYWHERE, SOMEWHERE):
    on_two_ranks.probe(seeded(0, data))
    on_two_ranks.probe(seeded(0, data), subject(OneLeftOut))
    on_two_ranks.probe(seeded(0, data), subject(OtherLoss))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_that_leaves_out_the_first_micro_batch_is_seen_whatever_the_seed(two_ranks, seed):
    result = two_ranks.probed(seeded(seed, EVERYWHERE), subject(FirstLeftOut))
    assert result.untested == []
    assert not result.within(TOLERANCE["fp32"])
    assert result.pattern == "the first pass is missing" or len(result.expected) < 3
    assert np.allclose(result.measured[0], 0, atol=1e-5)


def test_a_micro_batch_of_one_rank_that_is_left_out_is_seen_in_a_full_window(two_ranks):
    result = two_ranks.probed(seeded(0, EVERYWHERE), subject(OneLeftOut))
    shares = np.array(result.measured) / np.array(result.expected)
    assert np.allclose(shares.reshape(-1), [*[1] * (shares.size - 1), 0], atol=1e-5)


@pytest.mark.parametrize("data", [EVERYWHERE, SOMEWHERE])
def test_the_default_seed_is_right_in_both_windows(two_ranks, data):
    result = two_ranks.probed(seeded(0, data))
    assert result.within(TOLERANCE["fp32"]), result
    assert bool(result.untested) == (data == SOMEWHERE)


@pytest.mark.parametrize("data", [EVERYWHERE, SOMEWHERE])
def test_another_loss_is_said_to_be_one(two_ranks, data):
    """Its update is no sum of the gradients, and what their coefficients look like says nothing."""
    result = two_ranks.probed(seeded(0, data), subject(OtherLoss))
    assert result.residual > 0.5
    assert "another loss" in result.pattern
    assert not result.within(TOLERANCE["fp32"])
