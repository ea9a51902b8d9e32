"""Models as people build them: refused where DeepSpeed can't train them, and right where ranks share the experts."""

from itertools import product

import deepspeed
import pytest
import torch

import ds_parity
from ds_parity.config.releases import release
from ds_parity.engine.internals.installed import before
from ds_parity.parity.matrix import model_setups
from ds_parity.parity.matrix.model_rows import MODEL_SETUPS
from ds_parity.parity.running.own_batches import own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.sketches import start_of
from tests.distributed.cells import STAGES, config
from tests.distributed.continuing import AFTER, BEFORE, Run
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytest.importorskip("peft")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

RELEASED = "have different metadata than during the forward pass"
ADAPTED = ("lora", "lora_checkpointed", "lora_reentrant")


@at_length_on_two_ranks
def unfit(folder):
    """What `initialize` says of models that do not go with the stage, on every rank."""
    said = {}
    for stage in (0, 1, 2):
        with deepspeed.zero.Init(config_dict_or_path=config(3)):
            model = model_setups.born(0)
        said[stage] = from_all(_refused(model, stage))
    with model_setups.experts_everywhere({}):
        said[3] = from_all(_refused(model_setups.deepspeed_moe(0), 3))
    return said


def _refused(model, stage):
    return refusal(lambda: ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config(stage)))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_that_was_born_partitioned_is_refused_below_zero_3(two_ranks_at_length, stage):
    for said in two_ranks_at_length.of(unfit)[str(stage)]:
        assert said.startswith(f"ConfigError: zero_optimization.stage = {stage}, and embedding.weight is partitioned")


def test_deepspeeds_own_experts_are_refused_on_zero_3(two_ranks_at_length):
    for said in two_ranks_at_length.of(unfit)["3"]:
        assert said.startswith("ConfigError: zero_optimization.stage = 3, and blocks.0.added.moe is DeepSpeed's own")


@at_length_on_two_ranks
def experts(folder):
    """The norm of a clipped gradient on ZeRO 0 and the weights before it, with experts everywhere and in halves."""
    found = {}
    ids = torch.arange(48).view(2, 24) + 3
    for name, dtype in product(("experts_everywhere", "experts_apart"), ("fp32", "bf16")):
        with getattr(model_setups, name)({}):
            model = model_setups.deepspeed_moe(0)
        # Both sorts of parameters are handed over in groups of their own, as DeepSpeed wants it.
        given = model_setups.expert_groups(model)
        engine, *_ = ds_parity.initialize(model=model, config=config(0, dtype, passes=2), **given)
        start = start_of(engine.module)
        # bf16 rounds most of a step away, so that the optimizer's own copies are asked.
        stepped = [one for group in engine.optimizer.param_groups for one in group["params"]]
        before = [one.detach().clone() for one in stepped]
        engine.backward(engine(ids.to(engine.device)).float().logsumexp(-1).pow(2).mean())
        engine.step()
        moved = [one.detach() - was for one, was in zip(stepped, before, strict=True)]
        found[name if dtype == "fp32" else f"{name}, bf16"] = {
            "norm": from_all(engine.last_step.grad_norm),
            "start": [start.norm, *start.sketch],
            "moved": from_all(float(torch.cat([one.flatten() for one in moved]).norm())),
        }
        engine.destroy()
    return found


def test_experts_are_clipped_by_the_norm_of_all_of_them_wherever_they_lie(two_ranks_at_length):
    """Ranks have the same tokens, so that the gradient is the same with experts in halves."""
    found = two_ranks_at_length.of(experts)
    (whole, _), halves = (found[name]["norm"] for name in ("experts_everywhere", "experts_apart"))
    assert whole > 0.5  # what the configuration clips at
    assert halves == [pytest.approx(whole, rel=1e-5)] * 2


@pytest.mark.parametrize("name", ["experts_everywhere", "experts_apart"])
def test_experts_are_in_the_norm_in_bf16(two_ranks_at_length, name):
    """The wrapper of SGD there takes the norm of all but the experts."""
    found = two_ranks_at_length.of(experts)
    whole, half = (found[one]["norm"] for one in ("experts_everywhere", f"{name}, bf16"))
    assert half == [pytest.approx(whole[0], rel=0.01)] * 2
    # Both were clipped, to the same length.
    assert found[f"{name}, bf16"]["moved"] == [pytest.approx(one, rel=0.01) for one in found[name]["moved"]]


def test_a_trace_tells_of_the_experts_of_all_ranks(two_ranks_at_length):
    found = two_ranks_at_length.of(experts)
    assert found["experts_apart"]["start"] == pytest.approx(found["experts_everywhere"]["start"], rel=1e-9)


class _Adapted(Run):
    """A run that trains LoRA adapters alone, and hands only them over."""

    def __init__(self, scenario):
        self.scenario = scenario
        module = scenario.build()
        self.engine, *_ = ds_parity.initialize(model=module, config=scenario.config, **scenario.keywords(module))
        self.batches, self.idle = own_batches(scenario), stand_in(scenario)


@at_length_on_two_ranks
def adapters_resumed(folder):
    """By stage: whether a run of adapters goes on from a checkpoint that has no frozen weights."""
    fields = {"model": f"{MODEL_SETUPS}:lora_reentrant", "setup": f"{MODEL_SETUPS}:adapters", "max_tokens": 64}
    alike = {}
    for stage in STAGES:
        extended = config(stage, "bf16", optimizer="AdamW", loss_weight="token", lr_progress="rollout")
        name = f"adapters-{stage}"
        scenario = Scenario(name, extended, shape="overshoot", windows=BEFORE + AFTER, seed=3, **fields)
        run, again = _Adapted(scenario), _Adapted(scenario)
        run.windows(BEFORE)
        run.engine.save_checkpoint(f"{folder}/{name}", exclude_frozen_parameters=True)
        whole = run.windows(AFTER)
        again.engine.load_checkpoint(f"{folder}/{name}", load_module_strict=False)
        alike[stage] = [len(whole), again.windows(AFTER) == whole]
        run.engine.destroy()
        again.engine.destroy()
    return alike


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_of_adapters_goes_on_bit_for_bit_from_a_checkpoint_without_frozen_weights(two_ranks_at_length, stage):
    assert two_ranks_at_length.of(adapters_resumed)[str(stage)] == [AFTER, True]


@at_length_on_two_ranks
def recomputed(folder):
    """How often the first layer runs in a pass."""
    ids, counts = torch.arange(16).view(1, 16) + 3, {}
    for name in ADAPTED:
        model = getattr(model_setups, name)(0)
        runs = []
        model.get_submodule("base_model.model.model.layers.0.self_attn").register_forward_pre_hook(
            lambda *_, runs=runs: runs.append(1)
        )
        engine, *_ = ds_parity.initialize(model=model, config=config(3, passes=2), **model_setups.adapters(model))
        ids = ids.to(engine.device)
        try:
            engine.backward(engine(ids, labels=ids).loss)
        except torch.utils.checkpoint.CheckpointError as error:
            counts[name] = str(error)
            engine.destroy()
            continue
        engine.step()
        counts[name] = [len(runs), engine.last_step.grad_norm > 0]
        engine.destroy()
    return counts


def test_the_rows_with_checkpointing_do_run_layers_twice(two_ranks_at_length):
    found = two_ranks_at_length.of(recomputed)
    assert found["lora"] == [1, True]
    if before(release("0.19.3")) and RELEASED in str(found):
        pytest.skip(
            "before 0.19.3 DeepSpeed releases weights that a block's second run needs, with or without ds_parity"
        )
    assert found == dict(zip(ADAPTED, ([1, True], [2, True], [2, True]), strict=True))
