"""The loop of docs/several_engines.md, as it stands there: the critic takes the actor's steps."""

import json

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from tests.distributed.engines import perceptron
from tests.distributed.sets import on_two_ranks
from tests.pages import blocks

pytestmark = pytest.mark.ranks
ROLLOUTS = (7, 4)  # of each rank, one a micro-batch


def stream_of(number):
    device = get_accelerator().current_device_name()
    draw = torch.Generator().manual_seed(number)
    for _ in range(ROLLOUTS[number]):
        x, y = (torch.randn(3, width, generator=draw).to(device) for width in (4, 1))
        yield ds_parity.MicroBatch({"x": x, "y": y}, rollouts=1, tokens=3)


@on_two_ranks
def page(folder):
    """What both engines have counted."""
    extended = json.loads(blocks("several_engines", "json")[0])
    extended["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
    by_rollouts = {**extended, "gradient_accumulation_passes": 4, "ds_parity": {"loss_weight": "token"}}
    engines = {}
    for name, config in (("actor", by_rollouts), ("critic", extended)):
        model = perceptron()
        engines[name] = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    without = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    names = {
        **engines,
        "torch": torch,
        "reference": deepspeed.initialize(model=perceptron(), config=without)[0],
        "stream": stream_of(dist.get_rank()),
        "policy_loss": lambda said, kept: (said - kept - 1).pow(2).mean(),
        "value_loss": lambda said, right: (said - right).pow(2).mean(),
    }
    (code,) = blocks("several_engines", "python")
    exec(compile(code, "several_engines", "exec"), names)
    return {name: [one.global_steps, one.global_samples, one.last_step.tokens] for name, one in engines.items()}


def test_the_critic_takes_the_steps_of_the_actor(two_ranks):
    """Passes of both ranks have 2, 2, 2, 2, 1, 1 and 1 rollouts: two windows of 4, and one that the data ends."""
    assert two_ranks.of(page) == {"actor": [3, 11, 9], "critic": [3, 11, 9]}
