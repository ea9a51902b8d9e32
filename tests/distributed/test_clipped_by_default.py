"""Clipping is exact on each stage, whatever torch's default dtype is."""

import pytest
import torch

import ds_parity
from tests.defaults import default_dtype
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

DEFAULTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@on_two_ranks
def clipped(folder):
    """By stage and default dtype: how far a step at a rate of 1 goes, with a gradient of ones that is clipped to 1."""
    found = {}
    for stage in STAGES:
        for name, default in DEFAULTS.items():
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1, bias=False)
            before = model.weight.detach().clone()
            section = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_passes": 2,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
                "zero_allow_untested_optimizer": True,
            }
            with default_dtype(default):
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, config=section)
                x = torch.ones(1, 3, dtype=torch.float32, device=engine.device)
                engine.backward(engine(x).sum(), rollouts=1)
                engine.step()
            step = engine.module.weight.detach().cpu() - before
            found[f"{stage} {name}"] = from_all([step.dtype == torch.float32, step.norm().item()])
    return found


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_clipped_in_fp32_at_least(two_ranks, stage, name):
    for fp32, length in two_ranks.of(clipped)[f"{stage} {name}"]:
        assert fp32
        assert length == pytest.approx(1.0, abs=3e-6)
