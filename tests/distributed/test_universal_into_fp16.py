"""Checkpoints that were saved without fp16, and are loaded by engines that run in it: the loss scale is their own."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STAGES = (1, 2, 3)
SAVED_IN = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _engine(stage, seed, **keys):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), config=made)[0]


def _step(engine, dtype):
    # Gradients of 1e-6 are below what fp16 holds without a loss scale.
    x = torch.ones(2, 4, device=engine.device, dtype=DTYPES[dtype])
    engine.backward(engine(x).float().mean() * 1e-6, rollouts=1)
    engine.step()
    return weights.vector(engine.module).tolist()


@at_length_on_two_ranks
def into_fp16(folder):
    """By stage and the precision that saved: steps in fp32, and in fp16 behind a load, and with which loss scales."""
    results = {}
    with fp16_allowed():
        for stage in STAGES:
            for precision, keys in SAVED_IN.items():
                path = f"{folder}/{stage}-{precision}"
                saved = _engine(stage, 0, **keys)
                _step(saved, precision)
                saved.save_checkpoint(path)
                saved.__wrapped__.save_checkpoint(f"{path}-bare")
                assert converted(path, 1) in (None, "nothing was raised")
                assert converted(f"{path}-bare", 1) in (None, "nothing was raised")
                found = {}
                for by in (path, f"{path}-bare"):
                    one = _engine(stage, 1, **FP16, checkpoint={"load_universal": True})
                    said = refusal(lambda: one.load_checkpoint(by))  # noqa: B023
                    scale, steps = one.optimizer.loss_scale, [_step(one, "fp16") for _ in range(2)]
                    for _ in range(2):
                        _step(one, "fp16")
                    found[by.removeprefix(path)] = [said, scale, one.optimizer.loss_scale, steps]
                other = _engine(stage, 1, checkpoint={"load_universal": True})
                other.load_checkpoint(path)
                dist.barrier()
                found["in fp32"] = [_step(other, "fp32"), _step(other, "fp32")]
                as_it_is = _engine(stage, 1, **FP16)
                found["as it is"] = refusal(lambda: as_it_is.load_checkpoint(f"{path}-bare"))  # noqa: B023
                results[f"{stage} {precision}"] = found
    return from_all(results)


@pytest.mark.parametrize("by", ["", "-bare"], ids=["ds_parity", "bare"])
@pytest.mark.parametrize("precision", SAVED_IN)
@pytest.mark.parametrize("stage", STAGES)
def test_a_universal_checkpoint_leaves_the_loss_scale_of_the_configuration(two_ranks_at_length, stage, precision, by):
    for results in two_ranks_at_length.of(into_fp16):
        found = results[f"{stage} {precision}"]
        said, scale, behind, steps = found[by]
        assert said == "nothing was raised"
        # One that was saved in fp16 has its own scale, as a run that goes on in fp16 needs it.
        if precision == "fp16":
            assert (scale, behind) == (8.0, 8.0)
            continue
        assert scale == 1024.0
        assert behind > scale, "it grows again"
        for here, wanted in zip(steps, found["in fp32"], strict=True):
            assert here == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_as_it_is_one_of_bare_deepspeed_without_fp16_is_refused(two_ranks_at_length, stage):
    for results in two_ranks_at_length.of(into_fp16):
        assert "CheckpointError" in results[f"{stage} fp32"]["as it is"]
        assert results[f"{stage} fp16"]["as it is"] == "nothing was raised"


OTHERS = {
    "fp16 into fp32": ("fp16", "fp32", {}),
    "fp16 into fp32, weights alone": ("fp16", "fp32", {"load_optimizer_states": False}),
    "fp16 into bf16, weights alone": ("fp16", "bf16", {"load_optimizer_states": False}),
    "fp32 into fp16, weights alone": ("fp32", "fp16", {"load_optimizer_states": False}),
}
GROWING = {"fp16": FP16, "fp32": {}, "bf16": SAVED_IN["bf16"]}


@at_length_on_two_ranks
def into_others(folder):
    """By stage and what loads what: what is raised, and the loss scale behind a load and behind steps; without, too."""
    results = {}
    with fp16_allowed():
        for stage in STAGES:
            for name, (saved_in, loads_in, options) in OTHERS.items():
                saved, path = _engine(stage, 0, **GROWING[saved_in]), f"{folder}/{stage}-{name}"
                _step(saved, saved_in)
                saved.save_checkpoint(path)
                found = []
                for loads in (True, False):
                    one = _engine(stage, 1, **GROWING[loads_in])
                    load = lambda: one.load_checkpoint(path, **options)  # noqa: B023, E731
                    said = refusal(load) if loads else "nothing was raised"
                    found.append([said, one.optimizer.loss_scale])
                    for _ in range(4):
                        _step(one, loads_in)
                    found[-1].append(one.optimizer.loss_scale)
                results[f"{stage} {name}"] = found
    return from_all(results)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_brings_no_loss_scale_into_another_precision(two_ranks_at_length, stage, name):
    """Where it grows in fp32, the step is half as large as it should be."""
    for results in two_ranks_at_length.of(into_others):
        behind_a_load, new = results[f"{stage} {name}"]
        assert behind_a_load == new
        assert (new[1] < new[2]) == name.startswith("fp32"), "the scale of fp16 did not grow"
