"""With what coefficient did each micro-batch enter the step?"""

import numpy as np
import pytest

from ds_parity.parity.probe.decomposition import TOLERANCE
from ds_parity.parity.running.scenario import Scenario
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
