"""hpZ with frozen weights: behind a load every pass uses the weights that were loaded."""

import pytest
import torch
from torch import nn

import ds_parity
from ds_parity.parity.running.half_precision import forget_hpz
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
USED = ("new", "evaluated", "trained", "weights alone")


def _engine(seed, hpz):
    forget_hpz()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    keys = config(3, passes=2, optimizer="AdamW")
    keys["zero_optimization"] |= {"stage3_param_persistence_threshold": 0} | (
        {"zero_hpz_partition_size": 2} if hpz else {}
    )
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def _window(engine, number):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(engine.device)
    engine.backward(engine(x).pow(2).mean(), rollouts=1)
    engine.step()
    return engine.last_step.loss


def _behind_a_load(folder, used, hpz):
    """Losses and weights of an engine that begins with other weights, has been used, and loads a checkpoint."""
    saved = _engine(0, hpz)
    _window(saved, 0)
    saved.save_checkpoint(folder)
    engine = _engine(1, hpz)
    if used == "evaluated":
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(3, 4, device=engine.device))
        engine.train()
    elif used == "trained":
        _window(engine, 9)
    alone = {"load_optimizer_states": False, "load_lr_scheduler_states": False} if used == "weights alone" else {}
    engine.load_checkpoint(folder, **alone)
    losses = [_window(engine, number) for number in range(1, 4)]
    return losses, weights(engine)


@at_length_on_two_ranks
def hpz_behind_loads(folder):
    found = {
        used: [from_all(_behind_a_load(f"{folder}/{used} {hpz}", used, hpz)) for hpz in (False, True)] for used in USED
    }
    forget_hpz()
    return found


@pytest.mark.parametrize("used", USED)
def test_frozen_weights_are_those_that_were_loaded(two_ranks_at_length, used):
    plain, hpz = two_ranks_at_length.of(hpz_behind_loads)[used]
    assert hpz == plain
