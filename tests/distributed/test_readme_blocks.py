"""The README's Python runs as it stands there."""

import pytest
from ranked_readme import blocks

pytestmark = pytest.mark.ranks


def test_its_loops_train_on_ranks(two_ranks):
    """128 planned rollouts in windows of 64, twice; then 256 of which two of eight ranks hold their share."""
    told, streamed, planned = two_ranks.results["readme"]["steps"]
    assert told == [2, 128]
    assert streamed == [4, 256]
    assert planned[0] > 4
    assert len(blocks("In your trainer", "python")) == 2
    assert len(blocks("Planning", "python")) == 1
