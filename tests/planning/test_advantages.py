"""A reward is compared with those of its own prompt, wherever these stand."""

import math
from collections.abc import Iterator
from uuid import UUID

import numpy as np
import pytest
import torch
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


ASKED, EARNED = [7, 7, 8, 8], [1.0, 3.0, 0.0, 4.0]


@pytest.mark.parametrize(
    "prompts",
    [
        torch.tensor(ASKED),
        list(torch.tensor(ASKED)),
        np.array(ASKED),
        list(np.array(ASKED)),
        [torch.tensor(7), 7, np.int64(8), torch.tensor(8)],
        [(1, torch.tensor(7)), (torch.tensor(1), 7), ("b", np.int8(3)), ("b", 3)],
        iter(ASKED),
    ],
)
@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor(EARNED),
        list(torch.tensor(EARNED, requires_grad=True)),
        torch.tensor(EARNED).bfloat16(),
        np.array(EARNED, dtype=np.float32),
        [1, np.float16(3), torch.tensor([0.0]).squeeze(), 4.0],
    ],
)
def test_tensors_and_arrays_are_taken_by_their_values(prompts, rewards):
    """A tensor is equal to none other as a key, so that each rollout would be a group of its own: all advantages 0."""
    # A generator is used up by the first of the parameters that are combined with it.
    prompts = iter(ASKED) if isinstance(prompts, Iterator) else prompts
    advantages = group_advantages(prompts, rewards)
    assert advantages == [-1.0, 1.0, -1.0, 1.0]
    assert {type(one) for one in advantages} == {float}


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[1, 2], [1, 2]], r"prompt id 0 is \[1, 2\] \(list\), .* tuple\(ids\)"),
        (torch.tensor([[1, 2], [1, 2]]), r"prompt id 0 is \[1, 2\] \(list\), .* tuple\(ids\)"),
        (["a", {"text": "a"}], r"prompt id 1 is \{'text': 'a'\} \(dict\), "),
        ([math.nan, 1], r"prompt id 0 is nan \(float\), which is not equal to itself"),
        (torch.tensor(1), r"prompt ids are a Tensor without a length"),
        (5, r"prompt ids are a int without a length"),
    ],
)
def test_what_can_be_no_prompt_id_is_refused_with_the_way_out(prompts, says):
    with pytest.raises(ConfigError, match=says):
        group_advantages(prompts, [1.0, 0.0])


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (["x", 1.0], r"reward of prompt 'a' is 'x': it must be a number"),
        (["1.5", 1.0], r"reward of prompt 'a' is '1.5': it must be a number"),
        ([1.0, None], r"reward of prompt 'b' is None: it must be a number"),
        (torch.tensor([[1.0, 2.0], [1.0, 2.0]]), r"reward of prompt 'a' is \[1.0, 2.0\]: it must be a number"),
        ([1j, 1.0], r"reward of prompt 'a' is 1j: it must be a number"),
        ([10**400, 1.0], r"reward of prompt 'a' is 1000.*: it must be a number"),
        (torch.tensor(1.0), r"rewards are a Tensor without a length"),
        (None, r"rewards are a NoneType without a length"),
    ],
)
def test_what_can_be_no_reward_is_refused_with_the_way_out(rewards, says):
    with pytest.raises(ConfigError, match=says):
        group_advantages(["a", "b"], rewards)


def test_rewards_that_are_further_apart_than_a_number_can_say_are_refused():
    with pytest.raises(ConfigError, match=r"prompt 'p' are -1.7e\+308 and 1.7e\+308: .*; scale them down"):
        group_advantages("pp", [1.7e308, -1.7e308])


@pytest.mark.parametrize(
    ("one", "other"), [(1, "1"), (2.5, "2.5"), ((1, 2), "(1, 2)"), (UUID(int=1), str(UUID(int=1)))]
)
def test_one_prompt_as_a_number_and_as_a_text_is_refused(one, other):
    with pytest.raises(
        ConfigError, match=r"^prompt ids are .* and .* \(a text\), which are two, though they read alike"
    ):
        group_advantages([one, other, "another"], [1, 2, 3])


def test_numbers_and_texts_that_read_otherwise_may_stand_side_by_side():
    assert group_advantages([1, 1, "a", None], [1, 2, 3, 4]) == [-1, 1, 0, 0]


class _Unspoken:
    """A key without a text."""

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("other", [_Unspoken(), None, (1,) * 900])
def test_a_key_without_a_text_or_with_a_longer_one_stands_beside_any(other):
    assert group_advantages([other, other, "None"], [1, 2, 3]) == [-1, 1, 0]
