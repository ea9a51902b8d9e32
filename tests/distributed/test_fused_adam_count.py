"""DeepSpeed's Adam on ZeRO 0 in fp32: a parameter that is frozen leaves the steps of the others as they are."""

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


def _layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))


def _loss(model, number):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(model[0].weight)
    return sum(layer(x).pow(2).mean() for layer in model)


def _engine():
    model, keys = _layers(), config(0, passes=2) | {"optimizer": {"type": "AdamW", "params": RATES}}
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


def _apart(trained, folder, resumed):
    """How far the layer is from where it is alone, beside a step; `resumed`: by a checkpoint in each window."""
    engine = _engine()
    for number, row in enumerate(trained):
        if resumed and number:
            engine.save_checkpoint(folder, tag=str(number))
            engine = _engine()
            engine.load_checkpoint(folder, tag=str(number))
        for layer, on in zip(engine.module, row, strict=True):
            layer.requires_grad_(bool(on))
        engine.backward(_loss(engine.module, number), rollouts=1)
        engine.step()
    place, due = _alone(trained)
    return float((engine.module[place].weight.detach().double().cpu() - due).abs().max()) / RATES["lr"]


@at_length_on_two_ranks
def frozen_with_fused_adam(folder):
    return {
        f"{name} {resumed}": from_all(_apart(trained, f"{folder}/{name} {resumed}", resumed))
        for name, trained in FROZEN.items()
        for resumed in (False, True)
    }


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", FROZEN)
def test_the_others_step_as_with_nothing_frozen(two_ranks_at_length, name, resumed):
    assert max(two_ranks_at_length.of(frozen_with_fused_adam)[f"{name} {resumed}"]) < 1e-3
