"""Weights alone bring all that a model keeps: buffers of each rank in their own type, and what a module saves."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WAYS = {
    "whole": {},
    "alone": {"load_optimizer_states": False},
    "alone, by its tag": {"load_optimizer_states": False, "tag": "global_step1"},
    "alone, loosely": {"load_optimizer_states": False, "load_module_strict": False},
}


class _Model(torch.nn.Module):
    """A layer beside a buffer that is another one on each rank, one in fp64, one of whole numbers, and a text."""

    def __init__(self, value, text):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.again = self.layer
        self.register_buffer("own", torch.full((2,), value + dist.get_rank()))
        self.register_buffer("third", torch.full((2,), value / 3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(int(value)))
        self.text = text

    def get_extra_state(self):
        return self.text

    def set_extra_state(self, state):
        self.text = state

    def forward(self, x):
        return self.layer(x).float().pow(2).mean()


def _engine(stage, value, text):
    model = _Model(value, text)
    keys = config(stage, "fp32", 2, "AdamW")
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def _state(engine):
    module = engine.module
    return [module.own.tolist(), module.third.tolist(), str(module.third.dtype), int(module.count), module.text]


@at_length_on_two_ranks
def states_of_models(folder):
    """By stage and way: what a load ends in, and what each rank's model keeps before the save and behind the load."""
    results = {}
    for stage in STAGES:
        path = f"{folder}/{stage}"
        engine = _engine(stage, 5.0, "saved")
        engine.backward(engine(torch.ones(2, 4, device=engine.device)), rollouts=1)
        engine.step()
        engine.save_checkpoint(path)
        saved = from_all(_state(engine))
        for name, how in WAYS.items():
            engine = _engine(stage, 8.0, "own")
            said = from_all(refusal(lambda: engine.load_checkpoint(path, **how)))  # noqa: B023
            results[f"{stage} {name}"] = [said, saved, from_all(_state(engine))]
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_has_what_was_saved_of_it(two_ranks_at_length, stage, way):
    said, saved, behind = two_ranks_at_length.of(states_of_models)[f"{stage} {way}"]
    assert said == ["nothing was raised"] * 2
    # Below ZeRO 3 the model is saved by the first rank.
    wanted = saved if stage == 3 else [saved[0]] * 2
    assert behind == wanted
