"""A universal checkpoint that was saved with Adam on the CPU goes on without offload, and the reverse."""

import pytest
import torch

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import OFFLOADED, converted
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
CASES = [(stage, precision, on) for stage in (1, 2, 3) for precision in ("fp32", "bf16") for on in (True, False)]
PARAMS = {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.01}


def _engine(stage, precision, *, offloaded, universal):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    keys = config(stage, precision, 2) | {"checkpoint": {"load_universal": universal}}
    keys["zero_optimization"] |= OFFLOADED if offloaded else {}
    keys["optimizer"] = {"type": "AdamW", "params": PARAMS | ({} if offloaded else {"torch_adam": True})}
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=keys)[0]


def _losses(engine, seeds):
    losses, kind = [], next(engine.module.parameters()).dtype
    for seed in seeds:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device, kind)
        engine.backward(engine(x).float().pow(2).mean(), rollouts=1)
        engine.step()
        losses.append(engine.last_step.loss)
    return losses


def _goes_on(stage, precision, path, *, offloaded):
    saved = _engine(stage, precision, offloaded=offloaded, universal=False)
    _losses(saved, range(3))
    saved.save_checkpoint(path)
    said = converted(path, 3)
    assert said in (None, "nothing was raised"), said
    due, loaded = _losses(saved, range(3, 7)), _engine(stage, precision, offloaded=not offloaded, universal=True)
    loaded.load_checkpoint(path)
    return [due, _losses(loaded, range(3, 7))]


@at_length_on_two_ranks
def off_the_cpu(folder):
    """By stage, precision and whether the run that saves is offloaded: the losses that are due, and those behind it."""
    return {
        f"{stage} {precision} {on}": from_all(
            _goes_on(stage, precision, f"{folder}/{stage}-{precision}-{on}", offloaded=on)
        )
        for stage, precision, on in CASES
    }


@pytest.mark.parametrize(("stage", "precision", "offloaded"), CASES)
def test_a_run_goes_on_with_the_other_adam(two_ranks_at_length, stage, precision, offloaded):
    for due, found in two_ranks_at_length.of(off_the_cpu)[f"{stage} {precision} {offloaded}"]:
        # Both compute alike but for the last bits; in bf16 a last bit of a weight is 2**-8 of it.
        assert found == pytest.approx(due, rel=1e-5 if precision == "fp32" else 2e-2)
        assert len(set(due)) == 4
