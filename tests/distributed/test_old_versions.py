"""What ranked_versions.py did, held against what was promised."""

import pytest

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("cell", ["2", "2 offload", "3", "3 offload"])
def test_a_window_without_a_last_backward_ends_the_same_by_hand_and_by_deepspeed(two_ranks, cell):
    found = two_ranks.results["ended_without_a_backward"].get(cell)
    if found is None:
        pytest.skip("refused with this DeepSpeed (engine/versions.py)")
    assert found["moved"]
    assert found["difference"] <= 1e-6
    assert found["norms"] == pytest.approx([found["norms"][0]] * len(found["norms"]), rel=1e-6)
