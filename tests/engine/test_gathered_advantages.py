"""Advantages over several ranks, with what the other ranks send put in by hand: they are read once, or by nobody."""

import pickle

import pytest
import torch

from ds_parity.engine.ranks.gathered_advantages import gathered_advantages
from ds_parity.errors import ConfigError, RankDesyncError
from ds_parity.planning import group_advantages


class Line:
    """Two or more ranks, all in this process: the first asks, the others have sent what they would."""

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return pickle.loads(pickle.dumps([value, *self.sent()]))

    def sent(self):
        sent = []
        for prompts, rewards, first in self.others:
            try:
                gathered_advantages(prompts, rewards, _Listening(sent), first, by_std=True)
            except _SentError:
                continue
        return sent


class _SentError(Exception):
    """What a rank sends is known; it would go on with the answer."""


class _Listening:
    def __init__(self, sent):
        self.sent = sent

    def gather(self, value):
        self.sent.append(value)
        raise _SentError


def of(prompts, rewards, *others, first=True):
    return gathered_advantages(prompts, rewards, Line(*others), first, by_std=True)


def test_ranks_that_ask_for_other_kinds_are_told():
    line = Line((["a", "a"], [1.0, 2.0], True))
    with pytest.raises(
        RankDesyncError, match=r"group_advantages\(\): ranks differ in by_std \(rank 0 has False; rank 1"
    ):
        gathered_advantages(["a"], [3.0], line, True, by_std=False)


def test_tensors_are_taken_by_their_values():
    expected = group_advantages([7, 8, 7, 8, 8], [1.0, 2.0, 3.0, 4.0, 9.0])
    assert of(torch.tensor([7, 8]), torch.tensor([1.0, 2.0]), ([7, 8, 8], [3.0, 4.0, 9.0], True)) == expected[:2]


WRONG = {
    "no number": ((["a"], ["x"], True), "reward of prompt 'a' is 'x': it must be a number"),
    "not finite": ((["a"], [float("nan")], True), "reward of prompt 'a' is nan: it must be finite"),
    "unhashable": (([["a"]], [1.0], True), r"prompt id 0 is \['a'\] \(list\)"),
    "too many": ((["a"], [1.0, 2.0], True), "2 rewards for 1 prompt ids"),
    "no prompts": ((None, [1.0], True), "prompt ids are a NoneType"),
    "of a micro-batch that is shared": ((["a"], ["x"], False), "reward of prompt 'a' is 'x': it must be a number"),
    "not the same elsewhere": (
        ([object()], [1.0], True),
        "prompt id 0 is <object.*>, which is another one on each rank",
    ),
    "not to be sent": (([lambda: 0], [1.0], True), "prompt id 0 is <function.*can't be sent to other ranks"),
    "not what its group gave": ((["b"], [1.0], False), "the rank gave that shares its micro-batch"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("by", ["this rank", "another rank"])
def test_what_one_rank_gave_wrong_is_an_error_on_every_rank(case, by):
    wrong, says = WRONG[case]
    right = (["a", "a"], [1.0, 2.0], True)
    mine, theirs = (wrong, right) if by == "this rank" else (right, wrong)
    number = 0 if by == "this rank" else 1
    with pytest.raises(ConfigError, match=rf"^group_advantages\(\) on rank {number} .*: .*{says}"):
        of(mine[0], mine[1], theirs, first=mine[2])


def test_objects_of_a_users_own_that_are_equal_after_they_travelled_are_prompts():
    assert of([("a", 1)], [1.0], ([("a", 1)], [3.0], True)) == [-1.0]


def test_a_rank_that_shares_its_micro_batch_is_given_the_advantages_of_its_group():
    assert of(["a", "a"], [1.0, 3.0], (["a", "a"], [1.0, 3.0], True), first=False) == [-1.0, 1.0]


def test_one_rank_alone_says_what_is_wrong_and_sends_nothing():
    with pytest.raises(ConfigError, match=r"^reward of prompt 'a' is 'x'"):
        gathered_advantages(["a"], ["x"], None, True, by_std=True)
    assert gathered_advantages([object()] * 2, [1.0, 3.0], None, True, by_std=True)[1] != 0.0
