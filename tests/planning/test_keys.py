"""Ids and tokens of any library go by their value: rollouts are put together as those with plain ones are."""

import math

import numpy as np
import pytest
import torch

import ds_parity
from ds_parity import Rollout
from ds_parity.errors import ConfigError

KINDS = {"torch": torch.tensor, "numpy": np.array, "list": list}
TURNS = [(2, 4), (4, 6)]


def _counts(units, **options):
    planned = ds_parity.plan(units, dp_world_size=2, target=1, max_tokens=64, **options)
    return [window.tolist() for window in planned.counts]


def _rollouts(ids):
    return [Rollout(one, (1, 2, 3), 1) for one in ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["number", "tuple of numbers"])
def test_prompts_are_those_of_plain_numbers(kind, shape):
    plain = [0, 0, 0, 0, 1, 1, 1, 1]
    ids = list(KINDS[kind](plain))
    if shape != "number":
        plain, ids = [(one, 5) for one in plain], [(one, 5) for one in ids]
    assert _counts(_rollouts(ids), count="prompt") == _counts(_rollouts(plain), count="prompt")
    assert len(_counts(_rollouts(ids), count="prompt")) == 2


def test_pairs_are_of_one_prompt_too():
    pairs = [
        [ds_parity.PreferencePair(*_rollouts([one, one])) for one in ids]
        for ids in ([7, 7, 8], [*torch.tensor([7, 7, 8])])
    ]
    first, second = (_counts(units, count="prompt") for units in pairs)
    assert first == second
    assert len(first) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_one_rollout_count_once(kind):
    one, other = list(KINDS[kind]([7, 7]))
    turns = [Rollout("p", (1, 2, 3), 1, rollout_id=one), Rollout("p", (1, 2, 3, 4, 5), 4, rollout_id=other)]
    assert len(_counts(turns)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_turns_may_be_what_a_tokenizer_returns(kind):
    turns = ds_parity.by_turn(Rollout("p", KINDS[kind]([1, 2, 3, 4, 5, 6]), 2), TURNS, "a")
    assert _counts(list(turns)) == _counts(list(ds_parity.by_turn(Rollout("p", (1, 2, 3, 4, 5, 6), 2), TURNS, "a")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_is_given_twice_is_refused_whatever_its_tokens_are(kind):
    turns = [
        turn
        for _ in range(2)
        for turn in ds_parity.by_turn(Rollout("p", KINDS[kind]([1, 2, 3, 4, 5, 6]), 2), TURNS, "a")
    ]
    with pytest.raises(ConfigError, match="rollout 2 repeats a turn of rollout 'a' of prompt 'p'"):
        _counts(turns)


@pytest.mark.parametrize("name", ["prompt_id", "rollout_id"])
@pytest.mark.parametrize("nan", [math.nan, torch.tensor(math.nan), np.float32("nan")])
def test_a_nan_is_no_id(name, nan):
    one = Rollout("p", (1, 2, 3), 1) if name == "rollout_id" else Rollout(nan, (1, 2, 3), 1)
    if name == "rollout_id":
        one = ds_parity.by_turn(one, [(1, 3)], nan)[0]
    with pytest.raises(ConfigError, match=rf"rollout 0: {name} is nan \(float\), which is not equal to itself"):
        _counts([one])


def test_what_was_planned_has_the_ids_as_they_are_compared():
    planned = ds_parity.plan(_rollouts(torch.tensor([3, 4])), dp_world_size=1, target=2, max_tokens=64)
    assert [one.prompt_id for one in planned.rollouts] == [3, 4]
    plain = _rollouts(["a", "b"])
    planned = ds_parity.plan(plain, dp_world_size=1, target=2, max_tokens=64)
    assert all(one is other for one, other in zip(planned.rollouts, plain, strict=True))


def test_one_prompt_as_a_number_and_as_a_text_is_refused():
    with pytest.raises(ConfigError, match=r"prompt ids are 1 .int. and .1. .a text., which are two"):
        _counts(_rollouts([1, "1"]))
