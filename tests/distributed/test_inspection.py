"""A model that would look like a fault of an engine is refused before anything trains, in one sentence."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_parity.errors import ConfigError
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.running.inspection import inspect_model
from ds_parity.parity.running.scenario import Scenario
from tests.distributed.cells import config
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


class Around(nn.Module):
    """The bundled decoder, with something done to its logits."""

    def __init__(self, seed, change):
        super().__init__()
        self.policy, self.change = build_tiny(seed), change

    def forward(self, input_ids):
        return self.change(self.policy(input_ids))


class Dropping(nn.Module):
    """As transformers builds one: several dropouts, all on."""

    def __init__(self, seed):
        super().__init__()
        self.policy = build_tiny(seed)
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(6))

    def forward(self, input_ids):
        logits = self.policy(input_ids)
        for drop in self.drops:
            logits = drop(logits)
        return logits


def dropout(seed):
    return Dropping(seed)


def dropout_off(seed):
    return Dropping(seed).eval()


def noise(seed):
    return Around(seed, lambda logits: logits + 1e-6 * torch.rand_like(logits))


def nan(seed):
    return Around(seed, lambda logits: logits * float("nan"))


def infinite(seed):
    return Around(seed, lambda logits: logits.index_fill(1, torch.tensor([logits.shape[1] - 3]), float("inf")))


def nan_of_long_ones(seed):
    return Around(seed, lambda logits: logits * float("nan") if logits.shape[1] > 300 else logits)


def few_positions(seed):
    def change(logits):
        return logits + torch.zeros(300)[torch.arange(logits.shape[1])][:, None]

    return Around(seed, change)


def masked_ids(seed):
    """Token ids that are never used have the logit -inf, and no loss token is one."""
    return Around(seed, lambda logits: logits.index_fill(2, torch.tensor([259]), float("-inf")))


def weights_by_rank(seed):
    return build_tiny(seed + dist.get_rank())


def weights_by_nobody(seed):
    model = build_tiny(seed)
    nn.init.normal_(model.head.weight)
    return model


def logits_by_rank(seed):
    """Noise of one and the same draw in every forward, from a generator of each rank."""

    def change(logits):
        own = torch.Generator().manual_seed(dist.get_rank())
        return logits + torch.randn(logits.shape, generator=own)

    return Around(seed, change)


def few_ids(seed):
    return build_tiny(seed, vocab=200)


def no_logits(seed):
    return Around(seed, lambda logits: logits.mean(-1))


def a_tuple(seed):
    return Around(seed, lambda logits: (logits, logits))


def lazy(seed):
    model = Around(seed, lambda logits: logits)
    model.more = nn.LazyLinear(3)
    return model


class Moving(nn.Module):
    """The bundled decoder, with a number added to its logits that each forward moves."""

    def __init__(self, seed, *, buffer):
        super().__init__()
        self.policy = build_tiny(seed)
        if buffer:
            self.register_buffer("forwards", torch.zeros(()))
        else:
            self.forwards = torch.zeros(())

    def forward(self, input_ids):
        self.forwards += 1
        logits = self.policy(input_ids)
        return logits.index_add(2, torch.tensor([7]), 0.1 * self.forwards.expand(*logits.shape[:2], 1))


def counting(seed):
    return Moving(seed, buffer=True)


def remembering(seed):
    return Moving(seed, buffer=False)


def spectral(seed):
    model = build_tiny(seed)
    nn.utils.parametrizations.spectral_norm(model.head)
    return model


class Normed(nn.Module):
    """The bundled decoder with its logits normed over all tokens of a batch."""

    def __init__(self, seed):
        super().__init__()
        self.policy = build_tiny(seed)
        self.norm = nn.BatchNorm1d(self.policy.head.out_features)

    def forward(self, input_ids):
        return self.norm(self.policy(input_ids).transpose(1, 2)).transpose(1, 2)


def normed(seed):
    return Normed(seed)


def normed_off(seed):
    return Normed(seed).eval()


def over_rows(seed):
    return Around(seed, lambda logits: logits + 0.1 * logits.mean(0))


def over_padding(seed):
    return Around(seed, lambda logits: logits + 0.1 * logits.mean(1, keepdim=True))


def frozen(seed):
    return build_tiny(seed).requires_grad_(False)


def raising(seed):
    def change(logits):
        raise RuntimeError("needs attention_mask")

    return Around(seed, change)


def train(engine, micro_batches):
    """Takes whatever its model returns; here it is never called."""


# The model, and what must be said of it; "" where nothing is wrong.
MODELS = {
    dropout: "dropout is on, in drops.0 (p=0.1), drops.1 (p=0.1), drops.2 (p=0.1), drops.3 (p=0.1) and 2 more",
    dropout_off: "",
    noise: "two forwards of the same tokens return other logits",
    nan: "a log probability that is not finite",
    nan_of_long_ones: "a log probability that is not finite",
    few_positions: "its forward of token ids of the shape (1, 400) raises IndexError: index 300 is out of bounds",
    infinite: "a log probability that is not finite",
    masked_ids: "",
    weights_by_rank: "its weights on rank 1 are others than on rank 0",
    weights_by_nobody: "two calls with one seed return other weights",
    logits_by_rank: "rank 1 computes other logits than rank 0",
    few_ids: "it has 200 token ids, and the rollouts have the id 257",
    no_logits: "must be logits (rows, tokens, token ids)",
    a_tuple: "it returns a tuple, must be logits",
    raising: "raises RuntimeError: needs attention_mask",
    frozen: "it has no parameter that is trained (requires_grad)",
    lazy: "it has parameters without a shape yet (a lazy module)",
    counting: "it keeps something from one to the next, in the buffer forwards",
    remembering: "it keeps something from one to the next, such as its last output",
    spectral: "it keeps something from one to the next, in the buffer",
    normed: "",
    over_rows: "",
}
# What is said where some reference takes the rollouts of a window in one batch.
TOGETHER = "a rollout has other logits beside another one than alone"
IN_ONE = {
    normed: TOGETHER,
    over_rows: TOGETHER,
    over_padding: TOGETHER,
    normed_off: "",
    dropout_off: "",
    raising: "raises",
}
# What a training function may take.
ITS_OWN = (few_positions, no_logits, a_tuple, raising, frozen)


def said_of(model, dtype="fp32", *, in_one=False, tokens=400, **values):
    scenario = Scenario("look", config(2, dtype), model=f"{__name__}:{model.__name__}", max_tokens=tokens, **values)
    try:
        inspect_model(scenario.to_json(), in_one=in_one)
    except ConfigError as error:
        return str(error)
    return ""


@on_two_ranks
def looks(folder):
    before = torch.random.get_rng_state()
    said = {model.__name__: said_of(model) for model in MODELS}
    rollout = {"prompt": "2 + 2", "completion": "4", "reward": 1.0, "advantage": 1e300}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    far = path / f"far-{dist.get_rank()}.jsonl"
    far.write_text(f"{json.dumps(rollout)}\n" * 48)
    return {
        "said": said,
        "beyond fp32": said_of(dropout_off, rollouts=str(far)),
        "bf16": {model.__name__: said_of(model, "bf16") for model in (nan, dropout_off, dropout)},
        "in one": {model.__name__: said_of(model, in_one=True) for model in IN_ONE},
        "of one length": {
            model.__name__: said_of(model, in_one=True, tokens=24) for model in (normed, over_rows, dropout_off)
        },
        "bf16, in one": {model.__name__: said_of(model, "bf16", in_one=True) for model in (normed, dropout_off)},
        "trained": {model.__name__: said_of(model, train=f"{__name__}:train") for model in MODELS},
        "untouched": torch.equal(before, torch.random.get_rng_state()),
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_wrong_with_a_model_is_one_sentence(two_ranks, model):
    said, expected = two_ranks.of(looks)["said"][model.__name__], MODELS[model]
    assert expected in said
    assert bool(said) == bool(expected), said
    assert "\n" not in said


@pytest.mark.parametrize("model", IN_ONE, ids=lambda model: model.__name__)
def test_rollouts_that_have_a_part_in_one_another_cannot_be_computed_in_one_batch(two_ranks, model):
    said, expected = two_ranks.of(looks)["in one"][model.__name__], IN_ONE[model]
    assert expected in said
    assert bool(said) == bool(expected), said


def test_nor_can_they_in_bf16(two_ranks):
    found = two_ranks.of(looks)["bf16, in one"]
    assert TOGETHER in found["normed"]
    assert found["dropout_off"] == ""


def test_nor_can_they_where_all_rollouts_are_cut_to_one_length(two_ranks):
    found = two_ranks.of(looks)["of one length"]
    assert TOGETHER in found["normed"]
    assert TOGETHER in found["over_rows"]
    assert found["dropout_off"] == ""


def test_rollouts_that_make_no_micro_batch_are_what_is_wrong(two_ranks):
    """And not the model, which has seen none."""
    assert "advantage is 1e+300, must be one finite number of fp32" in two_ranks.of(looks)["beyond fp32"]


def test_the_same_is_said_in_bf16(two_ranks):
    found = two_ranks.of(looks)["bf16"]
    assert "not finite" in found["nan"]
    assert "dropout is on" in found["dropout"]
    assert found["dropout_off"] == ""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_training_function_may_take_what_its_model_returns_but_no_random_numbers(two_ranks, model):
    said = two_ranks.of(looks)["trained"][model.__name__]
    expected = "" if model in ITS_OWN else MODELS[model]
    assert expected in said
    assert bool(said) == bool(expected), said


def test_what_is_drawn_later_does_not_change_by_the_look(two_ranks):
    assert two_ranks.of(looks)["untouched"]
