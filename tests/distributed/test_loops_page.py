"""The blocks of docs/loops.md run as they stand there."""

import json

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from tests.distributed.sets import on_two_ranks
from tests.pages import blocks

pytestmark = pytest.mark.ranks

JSON, PYTHON = (blocks("loops", kind) for kind in ("json", "python"))


class Losses(torch.nn.Module):
    """One loss, or so many terms of one."""

    def __init__(self, terms):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.terms = torch.nn.Linear(4, 3), terms

    def forward(self, x):
        out = self.head(x).float()
        return out.pow(2).mean() if not self.terms else tuple(out[:, n].mean() for n in range(self.terms))


def stream_of(number):
    """Micro-batches of one rollout, each of so many tokens as its number says."""
    device = get_accelerator().current_device_name()
    for n in range(number):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(n + 100 * dist.get_rank())).to(device)
        yield ds_parity.MicroBatch(inputs={"x": x}, rollouts=1, tokens=n + 1)


@on_two_ranks
def page(folder):
    """By block: the last step of its loop."""
    results = []
    for text, code in zip(JSON, PYTHON, strict=True):
        config = json.loads(text)
        config["optimizer"]["params"]["torch_adam"] = True  # else DeepSpeed compiles its own, for minutes
        model = Losses(len(config["ds_parity"].get("terms", ())))
        engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
        windows = [list(stream_of(number)) for number in (3, 1, 2)]
        exec(code, {"engine": engine, "windows": windows, "stream": stream_of(64)})  # the page's own
        last = engine.last_step
        results.append([last.step, last.rollouts, last.tokens, sorted(last.metrics)])
        engine.destroy()
    return results


def test_its_loops_take_the_steps_that_it_says(two_ranks):
    assert two_ranks.of(page) == [[3, 4, 6, []], [2, 64, 3104, ["kl", "policy", "router"]]]
