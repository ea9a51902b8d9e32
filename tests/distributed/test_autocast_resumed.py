"""torch_autocast in fp16: a run that goes on from a checkpoint has the loss scale that was saved."""

import pytest
import torch

import ds_parity
from ds_parity.engine.internals.autocast import torch_autocast
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(torch_autocast is None, reason="this DeepSpeed has no torch_autocast"),
]

OFTEN, SELDOM = (1,), (0, 2, 3)


def build(stage):
    forget_autocast()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage},
    }
    return ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine, windows):
    """By window: whether its step was skipped, and the rate of the next one. A loss of 65536 * 4 is too large."""
    found = []
    for number in windows:
        x = torch.randn(1, 8, generator=torch.Generator().manual_seed(number)).to(engine.device)
        engine.backward(4 * engine(x).float().pow(2).sum(), rollouts=1)
        engine.step()
        found.append([engine.last_step.skipped, round(engine.get_lr()[0], 8)])
    return found


def behind_loads(stages, folder):
    """By stage: what the run does that goes on, and what a new engine and a used one do behind a load."""
    results = {}
    with fp16_allowed():
        for stage in stages:
            whole = build(stage)
            begins = train(whole, range(10))
            whole.save_checkpoint(f"{folder}/{stage}")
            right = train(whole, range(10, 14))
            new, used = build(stage), build(stage)
            train(used, range(2))
            behind = []
            for engine in (new, used):
                engine.load_checkpoint(f"{folder}/{stage}")
                behind.append(train(engine, range(10, 14)))
            results[stage] = from_all([begins, right, behind])
            for engine in (whole, new, used):
                engine.destroy()
        forget_autocast()
    return results


@on_two_ranks
def loss_scales_behind_loads(folder):
    return behind_loads(OFTEN, folder)


@at_length_on_two_ranks
def loss_scales_behind_loads_at_length(folder):
    return behind_loads(SELDOM, folder)


@pytest.mark.parametrize("stage", by_length(OFTEN, SELDOM, "two_ranks"))
def test_a_loss_scale_goes_on_as_it_was_saved(request, stage):
    """See tools/deepspeed_faults/autocast_fp16_scale_not_saved.py."""
    found = either(request, loss_scales_behind_loads, loss_scales_behind_loads_at_length, seldom=stage in SELDOM)
    for begins, right, behind in found[str(stage)]:
        assert begins[0][0], "the scale has to come down"
        assert not any(skipped for skipped, _ in right)
        assert behind == [right, right]
