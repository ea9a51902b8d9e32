"""A reward is compared with those of its own prompt, wherever these stand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.errors import ConfigError
from ds_parity.planning import group_advantages


def test_advantages_of_one_right_in_four_are_those_computed_by_hand():
    """Mean 1/4, population variance 3/16, so (1 - 1/4) / sqrt(3/16) = sqrt(3) and the others -1 / sqrt(3)."""
    expected = [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3
    assert group_advantages("pppp", [1, 0, 0, 0]) == pytest.approx(expected, rel=1e-15)


def test_without_the_deviation_they_are_differences_from_the_mean():
    assert group_advantages("pppp", [1, 0, 0, 0], by_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [0.0, 0.0, 0.0, 0.0]])
def test_equal_rewards_have_advantage_exactly_0(rewards):
    assert group_advantages("p" * len(rewards), rewards) == [0.0] * len(rewards)


def fp32(reward):
    return float(np.float32(reward))


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3, 0.3],
        [float(np.float32(0.1) + np.float32(0.2)), fp32(0.3), 0.3],  # fp64 beside fp32
        [sum([0.1] * 10), 1.0],
        [-(0.1 + 0.2), -0.3],
        [1e-12 / 3 * 3, 1e-12],
        [1e300 / 3 * 3 * (1 + 2**-50), 1e300],
    ],
)
def test_rewards_that_differ_by_rounding_alone_have_advantage_exactly_0(rewards, by_std):
    assert group_advantages("p" * len(rewards), rewards, by_std=by_std) == [0.0] * len(rewards)


@given(
    st.floats(-1e30, 1e30).filter(lambda reward: abs(reward) > 1e-30),
    st.lists(st.lists(st.sampled_from([1.1, 3.0, 0.7, 10.0]), max_size=4), min_size=2, max_size=6),
)
def test_what_eight_operations_in_fp32_round_is_no_signal(reward, factors):
    """Each is multiplied and divided by the same numbers, so all of them mean one reward."""
    rewards = []
    for own in factors:
        computed = np.float32(reward)
        for factor in own:
            computed = np.float32(computed * np.float32(factor)) / np.float32(factor)
        rewards.append(float(computed))
    assert group_advantages("p" * len(rewards), rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[1000.0, 1000.1], [1e-12, 2e-12], [1e300, 1e300 * (1 + 1e-5)], [0.0, 5e-300]])
def test_a_real_difference_is_signal_whatever_its_size(rewards):
    assert group_advantages("pp", rewards) == pytest.approx([-1.0, 1.0], rel=1e-9)


def test_a_group_is_judged_by_its_own_rewards():
    advantages = group_advantages("aabb", [1e6, 1e6, 1e-6, 2e-6])
    assert advantages == pytest.approx([0.0, 0.0, -1.0, 1.0])


@given(st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=9).filter(lambda r: len(set(r)) > 1))
def test_advantages_of_a_group_have_mean_0_and_variance_1(rewards):
    advantages = group_advantages("p" * len(rewards), rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-10)
    assert math.fsum(a * a for a in advantages) == pytest.approx(len(rewards))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=20).flatmap(st.permutations))
def test_a_group_is_the_same_wherever_its_rollouts_stand(given_rollouts):
    prompts, rewards = [p for p, _ in given_rollouts], [r for _, r in given_rollouts]
    together = sorted(range(len(prompts)), key=prompts.__getitem__)
    grouped = group_advantages([prompts[i] for i in together], [rewards[i] for i in together])
    advantages = group_advantages(prompts, rewards)
    assert [advantages[i] for i in together] == grouped


def test_a_reward_without_its_prompt_is_refused():
    with pytest.raises(ConfigError, match="2 rewards for 1 prompt ids"):
        group_advantages("p", [1.0, 0.0])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_prompt(reward):
    with pytest.raises(ConfigError, match=r"reward of prompt 'b' is (nan|inf): it must be finite"):
        group_advantages("aab", [1.0, 0.0, reward])


def test_rewards_of_any_kind_of_number_will_do():
    assert group_advantages("aa", np.array([1, 0])) == group_advantages("aa", [True, False]) == [1.0, -1.0]
