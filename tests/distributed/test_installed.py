"""What `deepspeed.initialize` returns under install(), driven as frameworks drive it."""

import pytest

from tests.distributed.cells import STAGES
from tests.distributed.ranked_install import CELLS

pytestmark = pytest.mark.ranks

REFUSALS = {
    "ends too soon": ["WindowError", "(True) before pass 1 of window 0", "4 of the 6 rollouts"],
    "goes on": ["WindowError", "(False) before pass 2 of window 0", "6 of the 6 rollouts"],
    "ranks differ": ["RankDesyncError", "was told to go on after its pass", "was told to end the window with its pass"],
    "short, twice": ["WindowError", "(True) before pass 0 of window 2", "2 of the 6 rollouts"],
    "short, dropped": ["WindowError", "window 1 is ended by its caller after 1 of 3", "last_window is 'drop'"],
    "short, stepped": ["nothing was raised"],
    "uneven": ["ConfigError", "gradient_accumulation_passes = 5 on 2", "choose 'reset'"],
    "uneven, reset": ["nothing was raised"],
    "weighed": ["WindowError", "ds_parity.loss_weight = 'rollout'", "remove ds_parity.loss_weight"],
    "tokens missing": ["WindowError", "without tokens="],
    "counted": ["nothing was raised"],
    "mixed": ["WindowError", "backward(scale_wrt_gas=True) after backward(scale_wrt_gas=False)"],
    "scheduler out of reach": ["ConfigError", "lr_progress is 'rollout'"],
    "inside passes": ["WindowError", "set_gradient_accumulation_boundary()", "inside passes()"],
}


@pytest.mark.parametrize(("stage", "how"), CELLS)
def test_windows_that_a_framework_ends_are_bit_identical_with_and_without_us(two_ranks, stage, how):
    found = two_ranks.results["framework_windows"][f"{stage} {how}"]
    assert found["equal"]
    assert found["norms"]
    assert found["moved"]
    assert found["passes"] == 6


@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_of_a_step_is_the_same_whoever_divides(two_ranks, stage):
    found = two_ranks.results["framework_windows"]
    assert found[f"{stage} divided"]["loss"] == pytest.approx(found[f"{stage} plain"]["loss"], rel=1e-6)


def test_every_refusal_is_looked_at(two_ranks):
    assert set(two_ranks.results["framework_refusals"]) == set(REFUSALS)


@pytest.mark.parametrize("how", REFUSALS)
def test_a_boundary_that_contradicts_the_counts_is_refused_on_every_rank(two_ranks, how):
    for error in two_ranks.results["framework_refusals"][how]:
        assert all(part in error for part in REFUSALS[how]), error


def test_engines_without_the_keys_or_an_optimizer_are_deepspeeds_own(two_ranks):
    types = two_ranks.results["framework_leaves_alone"]["types"]
    assert types == ["DeepSpeedEngine", "DeepSpeedEngine", "ParityEngine", "FrameworkEngine", "DeepSpeedEngine"]


def test_a_window_that_a_framework_cuts_short_is_a_step_and_the_next_is_whole(two_ranks):
    assert two_ranks.results["framework_leaves_alone"]["short"] == [3, 0, 14]


def test_a_loop_that_never_says_where_windows_end_has_them_counted(two_ranks):
    assert two_ranks.results["framework_leaves_alone"]["windows"] == 2
