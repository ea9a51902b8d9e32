"""The README's Python runs as it stands there."""

import pytest

from tests.distributed.ranked_readme import HEADINGS, blocks

pytestmark = pytest.mark.ranks


def test_its_loops_train_on_ranks(two_ranks):
    """128 planned rollouts in windows of 64, twice; then 320 planned as it says; then two rounds with a model of one's own."""
    found = two_ranks.results["readme"]
    assert found["steps"] == [[2, 128], [4, 256], [9, 576], [2, 128]]
    assert found["reward"] == 0.25
    assert [len(blocks(heading, "python")) for heading in HEADINGS] == [2, 1, 1]
