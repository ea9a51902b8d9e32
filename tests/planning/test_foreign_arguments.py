"""What is no rollout, no turn and no micro-batch is refused in plain words, wherever it is given."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ds_parity
from ds_parity import ConfigError, MicroBatch, PreferencePair, Rollout, by_turn, collate, labels, micro_batches, plan
from ds_parity import to_device as moved

GOOD = Rollout("a", (1, 2, 3), 1)
NUMBERS = {"dp_world_size": 1, "target": 1, "max_tokens": 9}


def planned(rollouts):
    return plan(rollouts, **NUMBERS)


@pytest.mark.parametrize("take", [planned, collate])
class TestWhatIsNoRollout:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ([GOOD, None], "rollout 1 is None"),
            ({"a": GOOD}, "rollouts are a dict"),
            ([(GOOD, GOOD)], r"rollout 0 is \(Rollout"),
            ([{"tokens": (1, 2)}], r"rollout 0 is \{'tokens'"),
            (GOOD, "rollouts are a Rollout"),
            (None, "rollouts are a NoneType"),
            ("abc", "rollouts are a str"),
            ([PreferencePair(GOOD, None)], "rejected of a pair of prompt 'a' is None"),
        ],
    )
    def test_is_refused_with_what_is_meant(self, take, given, said):
        with pytest.raises(ConfigError, match=f"{said}.*must be .*ds_parity.Rollout.*PreferencePair"):
            take(given)

    @pytest.mark.parametrize("tokens", ["abc", b"abc", None, 3, {1: 2}])
    def test_are_no_tokens(self, take, tokens):
        with pytest.raises(ConfigError, match=r"prompt 'p': tokens are .*, must be a sequence of token ids.*tokenizer"):
            take([GOOD, Rollout("p", tokens, 1)])

    @pytest.mark.parametrize("key", [[{"role": "user", "content": "1 + 1"}], {"text": "a"}, [1, 2]])
    @pytest.mark.parametrize("name", ["prompt_id", "rollout_id"])
    def test_are_no_keys(self, take, name, key):
        wrong = Rollout(**{"prompt_id": "p", "tokens": (1, 2, 3), "prompt_length": 1, name: key})
        with pytest.raises(ConfigError, match=rf"rollout 1: {name} is .* which can be no key .* their text or tuple"):
            take([GOOD, wrong])


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("tokens", [(1.5, 2, 3), (1, None), ("a", "b"), ((1, 2), (3, 4)), (1, 2**70)])
def test_token_ids_are_whole_numbers(layout, tokens):
    with pytest.raises(ConfigError, match=r"prompt 'p': tokens are .*, must be a sequence of token ids"):
        collate([GOOD, Rollout("p", tokens, 1)], layout=layout)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_token_ids_of_any_sequence_are_taken(layout, kind):
    one = Rollout("a", kind([1, 2, 3]), 1)
    assert planned([one]).passes == 1
    batch = collate([one], layout=layout)
    assert (batch.inputs["input_ids"].tolist(), batch.inputs["input_ids"].dtype) == ([[1, 2, 3]], torch.int64)


@pytest.mark.parametrize("pad", [0.5, None, "0", True])
def test_padding_is_a_token_id(pad):
    with pytest.raises(ConfigError, match=f"pad is {pad!r}: it must be a token id"):
        collate([GOOD], pad=pad)


@pytest.mark.parametrize("rank", [True, False, 0.0, "0", None])
def test_a_rank_is_a_number(rank):
    with pytest.raises(ConfigError, match=f"rank {rank!r}: .*numbered from 0 to 0"):
        next(micro_batches(planned([GOOD]), rank))


@pytest.mark.parametrize("window", [True, 0.0, "0", None])
def test_a_first_window_is_a_number(window):
    with pytest.raises(ConfigError, match=f"first_window = {window!r}: "):
        next(micro_batches(planned([GOOD]), 0, first_window=window))


@pytest.mark.parametrize("given", [[GOOD], None, {}])
def test_what_is_no_plan_is_refused(given):
    with pytest.raises(ConfigError, match=r"plan is a .*: it must be what ds_parity.plan\(\) returned"):
        next(micro_batches(given, 0))


class TestTurns:
    WHOLE = Rollout("p", (1, 2, 3, 4, 5, 6), 2)

    @pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda turns: (tuple(one) for one in turns)])
    def test_of_a_tensor_an_array_or_a_generator_are_taken_by_their_values(self, kind):
        turns = [[2, 3], [4, 6]]
        assert by_turn(self.WHOLE, kind(turns), "x") == by_turn(self.WHOLE, turns, "x")

    @pytest.mark.parametrize(
        "turns",
        [[(2.0, 3.0)], torch.tensor([[2.0, 3.0]]), [(2,)], [2, 3], [(2, 3, 4)], [None], None, 3, "23", [(2, "3")]],
    )
    def test_that_are_no_pairs_of_whole_numbers_are_refused(self, turns):
        with pytest.raises(ConfigError, match=r"rollout 'x': turns are .*\(start, end\)"):
            by_turn(self.WHOLE, turns, "x")

    @pytest.mark.parametrize("given", [None, PreferencePair(GOOD, GOOD), "abc"])
    def test_of_what_is_no_rollout_are_refused(self, given):
        with pytest.raises(ConfigError, match=r"rollout 'x': .* must be a ds_parity.Rollout"):
            by_turn(given, [(1, 2)], "x")


FOREIGN = [MicroBatch({"x": 1}), MicroBatch({}), MicroBatch(None), SimpleNamespace(inputs=None), {"input_ids": 1}, None]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_labels_are_made_of_collated_inputs(foreign):
    with pytest.raises(ConfigError, match=r"labels\(\) got a .*input_ids and loss_mask.*collate\(\)"):
        labels(foreign)


class TestMovingForeignMicroBatches:
    @pytest.mark.parametrize("value", [[1], None, 3, "abc", {"a": torch.ones(2)}])
    def test_whose_inputs_are_no_tensors_is_refused_by_the_inputs_name(self, value):
        with pytest.raises(ConfigError, match=r"input 'x' is a .*: it must be a tensor.*\.to\(device\)"):
            moved(MicroBatch({"y": torch.ones(2), "x": value}), "cpu")

    @pytest.mark.parametrize("foreign", [SimpleNamespace(inputs={}), {"x": torch.ones(2)}, None, MicroBatch(None)])
    def test_that_are_of_another_class_is_refused(self, foreign):
        with pytest.raises(ConfigError, match=r"to_device\(\) got a .*ds_parity.MicroBatch.*inputs"):
            moved(foreign, "cpu")

    def test_that_have_a_to_of_their_own_are_moved(self):
        batch = moved(MicroBatch({"x": torch.nn.utils.rnn.pack_sequence([torch.ones(2)])}), "cpu")
        assert batch.inputs["x"].data.tolist() == [1.0, 1.0]

    def test_keeps_the_name_of_the_package(self):
        assert ds_parity.to_device is moved
