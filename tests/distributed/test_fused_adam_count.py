"""DeepSpeed's Adam on ZeRO 0: parameters that are frozen, or of another dtype, leave the steps of others alone."""

import pytest
import torch
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
RATES = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}
# By case: whether each of three layers is trained, window by window.
FROZEN = {
    "the last one": [(1, 1, 1)] * 2 + [(1, 1, 0)] * 3,
    "the first one": [(1, 1, 1)] * 2 + [(0, 1, 1)] * 3,
    "two, in turns": [(1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 1, 0), (1, 0, 0), (1, 1, 1)],
    "all but the last one, thawed": [(1, 1, 1), (1, 1, 1), (1, 0, 0), (1, 0, 0), (1, 1, 1), (1, 1, 1)],
}
# By case: the dtypes of three layers, of which the first is the one that is looked at.
DTYPES = {
    "two wide, one narrow": (torch.float32, torch.bfloat16, torch.float32),
    "two narrow": (torch.float32, torch.bfloat16, torch.bfloat16),
}


def _layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))


def _loss(model, number):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(model[0].weight)
    return sum(layer(x.to(layer.weight.dtype)).pow(2).mean().to(x.dtype) for layer in model)


def _engine(dtypes=(torch.float32,) * 3, **params):
    model = _layers()
    for layer, dtype in zip(model, dtypes, strict=True):
        layer.to(dtype)
    keys = config(0, passes=2) | {"optimizer": {"type": "AdamW", "params": RATES | params}}
    del keys["scheduler"]
    keys["gradient_clipping"] = 0.0
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def _alone(trained):
    """The first layer that is always trained, in fp64, and its place."""
    place = next(at for at in range(3) if all(row[at] for row in trained))
    model = _layers().double()
    optimizer = torch.optim.AdamW(model[place].parameters(), **RATES)
    for number in range(len(trained)):
        optimizer.zero_grad()
        _loss(model, number).backward()
        optimizer.step()
    return place, model[place].weight.detach()


def _apart(trained, folder, resumed, *dtypes):
    """How far the layer is from where it is alone, beside a step; `resumed`: by a checkpoint in each window."""
    engine = _engine(*dtypes)
    for number, row in enumerate(trained):
        if resumed and number:
            engine.save_checkpoint(folder, tag=str(number))
            engine = _engine(*dtypes)
            engine.load_checkpoint(folder, tag=str(number))
        for layer, on in zip(engine.module, row, strict=True):
            layer.requires_grad_(bool(on))
        engine.backward(_loss(engine.module, number), rollouts=1)
        engine.step()
    place, due = _alone(trained)
    return float((engine.module[place].weight.detach().double().cpu() - due).abs().max()) / RATES["lr"]


def _handed_to_torch(folder):
    """The same with torch's AdamW behind the third of five windows, which goes by the count of each parameter."""
    engine = _engine()
    for number in range(5):
        if number == 3:
            engine.save_checkpoint(folder)
            engine = _engine(torch_adam=True)
            engine.load_checkpoint(folder)
        engine.backward(_loss(engine.module, number), rollouts=1)
        engine.step()
    _, due = _alone([(1, 0, 0)] * 5)
    return float((engine.module[0].weight.detach().double().cpu() - due).abs().max()) / RATES["lr"]


@at_length_on_two_ranks
def from_fused_adam_to_torch(folder):
    return from_all(_handed_to_torch(folder))


def test_the_counts_of_a_checkpoint_are_those_of_steps(two_ranks_at_length):
    assert max(two_ranks_at_length.of(from_fused_adam_to_torch)) < 1e-3


@at_length_on_two_ranks
def frozen_with_fused_adam(folder):
    cases = [(name, trained, ()) for name, trained in FROZEN.items()]
    cases += [(name, [(1, 1, 1)] * 4, (dtypes,)) for name, dtypes in DTYPES.items()]
    return {
        f"{name} {resumed}": from_all(_apart(trained, f"{folder}/{name} {resumed}", resumed, *dtypes))
        for name, trained, dtypes in cases
        for resumed in (False, True)
    }


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", [*FROZEN, *DTYPES])
def test_the_others_step_as_they_do_alone(two_ranks_at_length, name, resumed):
    assert max(two_ranks_at_length.of(frozen_with_fused_adam)[f"{name} {resumed}"]) < 1e-3
