"""A model that is converted to another type between windows: refused in a pass, and right once it is converted back."""

import pytest
import torch

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def converted(folder):
    """By stage: what a pass ends in behind `model.to(dtype)`, and how many steps there are once it is back."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, passes=2))
        one_pass(engine, 0)
        engine.module.to(torch.float64)
        engine.module.to(torch.float32)
        one_pass(engine, 1)
        steps = engine.last_step.step
        engine.module.to(torch.bfloat16)
        # Of ZeRO 3 the parameters are elsewhere, and stay as they were.
        there = next(engine.module.parameters()).dtype == torch.bfloat16
        said = refusal(lambda: _in_half(engine))  # noqa: B023
        found[str(stage)] = from_all([steps, there, said])
        engine.destroy()
    return found


def _in_half(engine):
    kind = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(3, 4, device=engine.device, dtype=kind)).float().pow(2).mean())


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_in_another_type_than_the_engines_is_refused(two_ranks, stage):
    for steps, there, said in two_ranks.of(converted)[str(stage)]:
        assert steps == 2
        if there:
            assert said.startswith("WindowError: ")
            assert "of torch.bfloat16 in window 2, and of torch.float32 when the engine was built" in said
        else:
            assert stage == 3
            assert said == "nothing was raised"
