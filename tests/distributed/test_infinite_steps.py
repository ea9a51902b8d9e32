"""A gradient that is not finite is skipped once: in bf16 without its section, and with sums in fp32 and offload."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import config
from tests.distributed.engines import build, from_all, listen
from tests.distributed.infinite import assert_all_skip, three_steps
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
KINDS = {
    "plain": ({}, {}),
    "fp16 by autocast": (FP16, {}),
    "fp16 by autocast, fp32 sums": ({**FP16, **SUMS}, {}),
    "fp16 by autocast, offloaded": (FP16, OFFLOAD),
    "bf16, fp32 sums, offloaded": ({"bf16": {"enabled": True}, **SUMS}, OFFLOAD),
    "fp16, fp32 sums, offloaded": ({"fp16": {"enabled": True, "initial_scale_power": 8}, **SUMS}, OFFLOAD),
    "bf16, offloaded": ({"bf16": {"enabled": True}}, OFFLOAD),
}
STAGES = (1, 2, 3)


@at_length_on_two_ranks
def infinite_once(folder):
    """By stage and kind, three steps of each rank, the second of which is infinite on the first rank."""
    results = {}
    with fp16_allowed():
        for stage in STAGES:
            for name, (keys, zero) in KINDS.items():
                forget_autocast()
                torch.manual_seed(0)
                model = torch.nn.Linear(4, 3).bfloat16()
                config = {
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_passes": 2,
                    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_optimization": {"stage": stage, **zero},
                    **keys,
                }
                engine = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
                results[f"{stage} {name}"] = from_all(_three(engine))
        forget_autocast()
    return results


def _three(engine):
    x = torch.ones(2, 4, dtype=engine.module.weight.dtype, device=engine.device)
    return three_steps(
        engine,
        engine.module.weight,
        lambda: engine(x).float().pow(2).mean(),
        lambda: weights.vector(engine.module).tolist(),
        infinite=torch.distributed.get_rank() == 0,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_gradient_is_skipped_once(two_ranks_at_length, stage, kind):
    assert_all_skip(two_ranks_at_length.of(infinite_once)[f"{stage} {kind}"])


# By stage and precision: the numbers of the windows of which a warning is given. Number 5 alone is finite.
TOLD = {
    (0, "fp32"): [0, 1, 3, 6, 7, 9, 13],
    (1, "bf16"): [0, 1, 3, 6, 7, 9, 13],
    (3, "bf16"): [0, 1, 3, 6, 7, 9, 13],
    (1, "fp16"): [13],
}


@at_length_on_two_ranks
def skips_in_a_row(folder):
    """By cell of TOLD: how the warnings of each rank begin, behind windows in which one rank's loss is NaN."""
    results = {}
    with fp16_allowed():
        for stage, precision in TOLD:
            half = {} if precision == "fp32" else {precision: {"enabled": True}}
            engine = build(config(stage, "fp32", 2) | half)
            text, end = listen()
            for number in range(14):
                wrong = dist.get_rank() and number != 5
                x = torch.ones(3, 4, dtype=next(engine.module.parameters()).dtype, device=engine.device)
                loss = engine(x).float().pow(2).mean()
                engine.backward(loss * (float("nan") if wrong else 1.0), rollouts=1)
                engine.step()
            end()
            lines = [line for line in text.getvalue().splitlines() if "gradient is not finite" in line]
            results[f"{stage} {precision}"] = from_all(
                [[line.partition(":")[0] for line in lines], engine.skipped_steps]
            )
    return results


@pytest.mark.parametrize(("stage", "precision"), TOLD)
def test_steps_that_are_skipped_are_told(two_ranks_at_length, stage, precision):
    """The first in a row, the second, the fourth, and so on; where the loss scale falls, the eighth."""
    for told, skipped in two_ranks_at_length.of(skips_in_a_row)[f"{stage} {precision}"]:
        assert told == [f"window {number}" for number in TOLD[stage, precision]]
        assert skipped == 13
