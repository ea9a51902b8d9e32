"""Weights that are one in the model that loads, and were two in the one that was saved: nobody may lose one of them."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks

pytestmark = pytest.mark.ranks


class _Model(torch.nn.Module):
    """An embedding, and a head that is its own, or the same weight."""

    def __init__(self, *, tied=False, frozen=True, equal=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        elif equal:
            self.head.weight.data.copy_(self.embedding.weight.data)
        if frozen and not tied:
            self.head.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.embedding(ids)).float().pow(2).mean()


def _takes_the_embedding(src, dst):
    dst.load_state_dict({name: one for name, one in src.items() if name != "head.weight"}, strict=False)


WEIGHTS = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
# By name: the model that is saved, whether bare DeepSpeed saves it, how it is loaded, and whether that is refused.
CASES = {
    "a frozen head": ({}, False, {}, True),
    "a frozen head of bare DeepSpeed": ({}, True, {}, True),
    "its weights alone": ({}, False, WEIGHTS, True),
    "weights of two that were trained": ({"frozen": False}, False, WEIGHTS, True),
    "one that was tied": ({"tied": True}, False, {}, False),
    "a function that says which": ({}, False, {**WEIGHTS, "custom_load_fn": _takes_the_embedding}, False),
}
OFTEN = ("a frozen head on 1", "a frozen head on 3", "one that was tied on 3")
WHOLE = tuple(f"{name} on {stage}" for name in CASES for stage in STAGES)
UNIVERSAL = tuple(
    f"{name}, universal on {stage}" for name in ("a frozen head", "one that was tied") for stage in (1, 2, 3)
)
SELDOM = tuple(case for case in (*WHOLE, *UNIVERSAL) if case not in OFTEN)


def built(stage, *, bare=False, universal=False, **options):
    model = _Model(**options)
    keys = {**config(stage, "fp32", 2, "AdamW"), "checkpoint": {"load_universal": universal}}
    if bare:
        keys = {**keys, "gradient_accumulation_steps": 1}
        del keys["gradient_accumulation_passes"]
    trained = [one for one in model.parameters() if one.requires_grad]
    return (deepspeed if bare else ds_parity).initialize(model=model, model_parameters=trained, config=keys)[0]


def saved(stage, folder, *, bare=False, **options):
    engine = built(stage, bare=bare, **options)
    loss = engine(torch.tensor([dist.get_rank(), 3], device=engine.device))
    engine.backward(loss, **({} if bare else {"rollouts": 1}))
    engine.step()
    engine.save_checkpoint(folder, tag="global_step1")
    engine.destroy()


def _values(engine):
    one = engine.module.embedding.weight
    whole = deepspeed.utils.safe_get_full_fp32_param(one)
    return (one.detach() if whole is None else whole).tolist()  # on ZeRO 0 in fp32 it is the weight itself


def loads(cases, folder):
    """By case: what a load into a model with one weight ends in, and whether a step is one of the saved embedding."""
    results = {}
    for case in cases:
        name, _, stage = case.rpartition(" on ")
        universal = name.endswith(", universal")
        options, bare, how, _ = CASES[name.removesuffix(", universal")]
        path = f"{folder}/{case}"
        saved(int(stage), path, bare=bare, **options)
        if universal:
            said = converted(path, 1)
            assert said in (None, "nothing was raised"), said
        engine = built(int(stage), universal=universal, tied=True, seed=1)
        said = from_all(refusal(lambda: engine.load_checkpoint(path, **how)))  # noqa: B023
        results[case] = [said, None]
        if said[0] == "nothing was raised":
            loaded = _values(engine)
            engine.backward(engine(torch.tensor([2, 3], device=engine.device)), rollouts=2)
            engine.step()
            moved = (torch.tensor(_values(engine)) - torch.tensor(loaded)).abs().max().item()
            results[case] = [said, moved]
        engine.destroy()
        dist.barrier()
    return results


@on_two_ranks
def loads_into_one_weight(folder):
    return loads(OFTEN, folder)


@at_length_on_two_ranks
def loads_into_one_weight_at_length(folder):
    return loads(SELDOM, folder)


@pytest.mark.parametrize("case", by_length(OFTEN, SELDOM, "two_ranks"))
def test_a_model_that_ties_what_was_two_weights_does_not_load_them(request, case):
    found = either(request, loads_into_one_weight, loads_into_one_weight_at_length, seldom=case in SELDOM)
    said, moved = found[case]
    refused = CASES[case.rpartition(" on ")[0].removesuffix(", universal")][-1]
    for one in said:
        if refused:
            assert one.startswith("CheckpointError: 'embedding.weight' and 'head.weight' are one weight in this"), one
        else:
            assert one == "nothing was raised"
    assert refused or 0 < moved < 0.01, "a step of Adam at a rate of 1e-3, and not one to another weight"
