"""An optimizer's step that raises: a checkpoint loads into the same engine, which trains on as if nothing had been."""

import pytest
import torch
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STAGES = (0, 1, 2, 3)


class NoMemoryLeftError(Exception):
    """What an optimizer may end in that finds no memory."""


def _engine(stage, client):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in ((model[0], 0.1), (model[2], 0.05))]
    keys = config(stage, passes=2)
    del keys["scheduler"]
    if client:
        del keys["optimizer"]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return ds_parity.initialize(model=model, optimizer=optimizer, config=keys)[0]
    return ds_parity.initialize(model=model, model_parameters=groups, config=keys)[0]


def _window(engine, number):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number)).to(engine.device)
    engine.backward(engine(x).pow(2).mean(), rollouts=1)
    engine.step()


def _trained(folder, stage, client, raises):
    """The weights behind three windows, between which a step may raise that a checkpoint takes back."""
    engine = _engine(stage, client)
    _window(engine, 0)
    engine.save_checkpoint(folder)
    if raises:

        def full(*_):
            raise NoMemoryLeftError

        # The place at which the optimizer itself steps; what wraps it is DeepSpeed's.
        handle = engine.basic_optimizer.register_step_pre_hook(full)
        with pytest.raises(NoMemoryLeftError):
            _window(engine, 1)
        handle.remove()
        engine.load_checkpoint(folder)
    for number in (1, 2):
        _window(engine, number)
    return weights(engine), engine.last_step.step, engine.last_step.loss


@at_length_on_two_ranks
def steps_that_raise(folder):
    return {
        f"{stage} {client}": [
            from_all(_trained(f"{folder}/{stage} {client} {raises}", stage, client, raises)) for raises in (False, True)
        ]
        for stage in STAGES
        for client in (False, True)
    }


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_takes_a_step_back_that_raised(two_ranks_at_length, stage, client):
    plain, raised = two_ranks_at_length.of(steps_that_raise)[f"{stage} {client}"]
    assert raised == plain
