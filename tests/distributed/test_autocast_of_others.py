"""torch_autocast of one engine is no other engine's, whichever of the two is built first."""

import deepspeed
import pytest
import torch

import ds_parity
from ds_parity.engine.internals.autocast import torch_autocast
from ds_parity.parity.running.half_precision import forget_autocast, fp16_allowed
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, perceptron
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(torch_autocast is None, reason="this DeepSpeed has no torch_autocast"),
]

FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
KINDS = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 256.0}},
    "bf16 reduced in fp32": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    "bf16 summed in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "autocast in bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast in fp16": FP16,
}


def _engine(stage, keys):
    return build({**config(stage, "fp32", 4), **keys})


def _trained(engine):
    """Steps, those that were skipped, and a weight behind three windows."""
    dtype = next(engine.module.parameters()).dtype
    for seed in range(3):
        for passes in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + passes))
            engine.backward(engine(x.to(engine.device, dtype)).float().pow(2).mean())
            engine.step()
    with deepspeed.zero.GatheredParameters(
        list(engine.module.parameters()), enabled=engine.zero_optimization_stage() == 3
    ):
        weights = [p.detach().double().flatten().tolist() for p in engine.module.parameters()]
    return engine.global_steps, engine.skipped_steps, weights


def of_others(stages):
    """By stage and kind: alone, behind an engine that was built before, and in front of one that is built since."""
    found = {}
    with fp16_allowed():
        for stage in stages:
            for kind, given in KINDS.items():
                # DeepSpeed has no sums in fp32 on ZeRO 0.
                keys = given if stage else {key: value for key, value in given.items() if key != "data_types"}
                forget_autocast()
                alone = _trained(_engine(stage, keys))
                _engine(stage, FP16)
                behind = _trained(_engine(stage, keys))
                forget_autocast()
                engine = _engine(stage, keys)
                _engine(stage, {} if "autocast" in kind else FP16)
                found[f"{stage}-{kind}"] = [alone, behind, _trained(engine)]
    forget_autocast()
    return from_all(found)


OFTEN, SELDOM = (1, 3), (0, 2)


@on_two_ranks
def autocast_of_others(folder):
    return of_others(OFTEN)


@at_length_on_two_ranks
def autocast_of_others_at_length(folder):
    return of_others(SELDOM)


def trains_as_alone(every, name):
    for found in every:
        alone, behind, before = found[name]
        assert alone[:2] == [3, 0]
        assert behind == alone
        assert before == alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", OFTEN)
def test_an_engine_trains_as_it_does_alone(two_ranks, stage, kind):
    trains_as_alone(two_ranks.of(autocast_of_others), f"{stage}-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", SELDOM)
def test_an_engine_of_the_other_stages_trains_as_it_does_alone(two_ranks_at_length, stage, kind):
    trains_as_alone(two_ranks_at_length.of(autocast_of_others_at_length), f"{stage}-{kind}")


@on_two_ranks
def model_of_an_autocast_engine(folder):
    """Whether a model keeps a note of the dtype in which an engine with torch_autocast has gathered its weights."""
    found = {}
    with fp16_allowed():
        for stage in STAGES[1:]:
            model = perceptron()
            for keys in (FP16, {}):
                engine = ds_parity.initialize(model=model, config={**config(stage, "fp32", 4), **keys})[0]
                noted = any(hasattr(p, torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME) for p in model.parameters())
                found.setdefault(str(stage), []).append(noted)
                engine.destroy()
    forget_autocast()
    return found


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_model_is_not_gathered_by_the_dtype_of_an_engine_it_had_before(two_ranks, stage):
    assert two_ranks.of(model_of_an_autocast_engine)[str(stage)] == [True, False]
