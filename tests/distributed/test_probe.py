"""With what coefficient did each micro-batch enter the step?"""

import numpy as np
import pytest

from ds_parity.parity.probe.decomposition import TOLERANCE, ProbeResult
from tests.distributed import cells

pytestmark = pytest.mark.ranks
OURS = "ds_parity.parity.subjects.candidate:run"
NEVER_MARKED = "ds_parity.parity.subjects.controls.boundary.last_backward_only:LastBackwardOnly.run"


@pytest.mark.parametrize(("stage", "dtype", "weight"), cells.RAGGED_CELLS)
def test_every_micro_batch_enters_with_its_weight_over_the_total(two_ranks, stage, dtype, weight):
    scenario = cells.probed(stage, dtype, weight)
    result = ProbeResult(**two_ranks.results[f"{scenario.name}: {OURS}"])
    assert result.within(TOLERANCE[dtype]), result
    assert result.pattern == "as expected"
    assert any(0.0 in row for row in result.expected), "no idle pass was probed"


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_keep_the_last_backward_alone_where_the_boundary_is_never_marked(two_ranks, stage):
    result = ProbeResult(**two_ranks.results[f"{cells.never_marked(stage).name}: {NEVER_MARKED}"])
    shares = np.array(result.measured) / np.array(result.expected)
    assert np.allclose(shares, [[0, 0], [0, 0], [1, 1]], atol=1e-5)
    assert "last-backward-only" in result.pattern
    assert not result.within(TOLERANCE["fp32"])


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_0_and_3_hide_that_fault(two_ranks, stage):
    """Why a test on these stages alone proves nothing about boundaries."""
    result = ProbeResult(**two_ranks.results[f"{cells.never_marked(stage).name}: {NEVER_MARKED}"])
    assert result.within(TOLERANCE["fp32"])
