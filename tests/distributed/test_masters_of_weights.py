"""`load_from_fp32_weights: false`: weights in fp32 are made of the model's in the checkpoint, and steps keep these."""

import pytest
import torch

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

SUMMED = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = {"1": (1, {}), "1, sums in fp32": (1, SUMMED), "2": (2, {})}
PARTS = {"all": {}, "weights alone": {"load_optimizer_states": False, "load_lr_scheduler_states": False}}


def engine_of(value, stage, more):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    keys = {**config(stage, "bf16", 2), **more}
    keys["zero_optimization"] = {"stage": stage, "load_from_fp32_weights": False}
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def step(engine, rate=None):
    for group in engine.optimizer.param_groups if rate is not None else ():
        group["lr"], group["weight_decay"] = rate, 0.0
    x = torch.ones(3, 4, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().pow(2).mean(), rollouts=1)
    engine.step()
    return [engine.last_step.step, *engine.last_step.lr, *engine.module.weight.detach().flatten().float().tolist()]


@on_two_ranks
def masters_of_weights(folder):
    """By case and part: a model's weights where they were saved, and behind a load and a step at a rate of 0."""
    found = {}
    for case, (stage, more) in CASES.items():
        saving = engine_of(5.0, stage, more)
        saved = step(saving)
        saving.save_checkpoint(f"{folder}/{case}")
        for part, options in PARTS.items():
            engine = engine_of(1.0, stage, more)
            engine.load_checkpoint(f"{folder}/{case}", **options)
            found[f"{case}: {part}"] = from_all([saved, step(engine, 0.0)])
            engine.destroy()
        saving.destroy()
    return found


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_keeps_the_weights_that_were_loaded(two_ranks, case, part):
    for saved, behind in two_ranks.of(masters_of_weights)[f"{case}: {part}"]:
        assert behind[:2] == [2, 0.0]
        assert behind[2:] == saved[2:] == [5.0] * 4  # its bf16 is too coarse for the rate
