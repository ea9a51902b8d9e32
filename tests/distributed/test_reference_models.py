"""An engine without an optimizer, as a reference model has none, is DeepSpeed's own; and ranks that differ in it."""

import copy
import json
import os
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, listen, one_pass, perceptron, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

HOW = ("config", "config_params", "args")


def without_optimizer(stage, **section):
    """The actor's configuration as a reference model gets it, a scheduler included."""
    extended = config(stage, passes=4, lookahead=2, **section)
    del extended["optimizer"]
    return extended


def reference(extended, how="config", model=None, **keywords):
    model = model or perceptron()
    if how == "args":
        keywords["args"] = SimpleNamespace(deepspeed_config=extended, local_rank=int(os.environ["LOCAL_RANK"]))
    else:
        keywords[how] = extended
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), **keywords)


@on_two_ranks
def references(folder):
    results = {}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for stage in STAGES:
        if stage in (1, 2):
            results[f"{stage}"] = from_all(refusal(lambda: reference(without_optimizer(stage))))  # noqa: B023
            with ds_parity.install():
                results[f"{stage} installed"] = from_all(
                    refusal(lambda: deepspeed.initialize(model=perceptron(), config=without_optimizer(stage)))  # noqa: B023
                )
            continue
        untyped = {**without_optimizer(stage), "optimizer": {"params": {"lr": 0.1}}}
        results[f"{stage} untyped"] = from_all(refusal(lambda: reference(untyped)))  # noqa: B023
        actor = build(config(stage, passes=4, lookahead=2, trace=f"{folder}/{stage}.jsonl"))
        for how in HOW:
            text, stop_listening = listen()
            given = without_optimizer(stage, trace=f"{folder}/{stage}.jsonl")
            before = copy.deepcopy(given)
            engine, _, loader, _ = reference(given, how)
            stop_listening()
            engine.eval()
            with torch.no_grad():
                out = engine(x.to(engine.device)).cpu()
            results[f"{stage} {how}"] = from_all(
                {
                    "type": type(engine).__name__,
                    "equal": torch.equal(out, perceptron()(x)),
                    "others": [loader is None, given == before],
                    "said": text.getvalue(),
                }
            )
        for index in range(2):
            one_pass(actor, index, rollouts=2)
        results[f"{stage} actor"] = [actor.window.index, actor.global_samples]
    return results


class TestAReferenceModelWithTheActorsConfiguration:
    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("stage", [0, 3])
    def test_is_deepspeeds_own_engine_on_every_rank_and_runs_forward(self, two_ranks, stage, how):
        for rank in two_ranks.of(references)[f"{stage} {how}"]:
            assert rank["type"] == "DeepSpeedEngine"
            assert rank["equal"]
            assert rank["others"] == [True, True]

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("stage", [0, 3])
    def test_is_said_to_count_nothing_once_by_the_first_rank(self, two_ranks, stage, how):
        first, second = two_ranks.of(references)[f"{stage} {how}"]
        assert first["said"].count("the engine over a Sequential has no optimizer") == 1
        assert "to train it, give it an optimizer" in first["said"]
        assert not second["said"]

    @pytest.mark.parametrize("stage", [0, 3])
    def test_with_an_optimizer_that_has_no_type_is_refused(self, two_ranks, stage):
        for told in two_ranks.of(references)[f"{stage} untyped"]:
            assert told.startswith("ConfigError: optimizer = {'params': {'lr': 0.1}} has no type")

    @pytest.mark.parametrize("stage", [0, 3])
    def test_leaves_the_actor_alone(self, two_ranks, stage):
        assert two_ranks.of(references)[f"{stage} actor"] == [2, 8]

    @pytest.mark.parametrize("door", ["", " installed"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_is_refused_on_stages_on_which_deepspeed_takes_none(self, two_ranks, stage, door):
        for told in two_ranks.of(references)[f"{stage}{door}"]:
            assert told.startswith(f"ConfigError: zero_optimization.stage = {stage} without an optimizer")
            assert "choose stage 0 or 3" in told


@on_two_ranks
def ranks_that_differ(folder):
    """One rank with an optimizer and one without; and one whose optimizer is another."""
    first = dist.get_rank() == 0
    model = perceptron()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {}
    for stage in (0, 2, 3):
        given = config(stage, passes=4) if first else without_optimizer(stage)
        results[f"{stage}"] = from_all(refusal(lambda: reference(given)))  # noqa: B023  # called here
    with ds_parity.install():
        given = config(0, passes=4) if first else without_optimizer(0)
        results["installed"] = from_all(refusal(lambda: deepspeed.initialize(model=perceptron(), config=given)))
    mine = {"optimizer": own} if first else {}
    results["other"] = from_all(refusal(lambda: reference(config(0, passes=4), model=model, **mine)))
    # All of them can still begin something together.
    engine = build(config(2, passes=4))
    one_pass(engine, 0, rollouts=2)
    results["goes on"] = [engine.window.index, json.dumps(weights.summary(weights.vector(engine.module)).checksum)]
    return results


@pytest.mark.parametrize("case", ["0", "3", "installed"])
def test_ranks_that_differ_in_having_an_optimizer_are_refused_everywhere(two_ranks, case):
    for told in two_ranks.of(ranks_that_differ)[case]:
        assert told.startswith("RankDesyncError: ranks differ in where their optimizer comes from")
        assert 'rank 0 has "the section `optimizer`"; rank 1 has "nowhere"' in told


def test_a_rank_without_one_says_what_its_stage_needs_and_the_others_repeat_it(two_ranks):
    with_one, without = two_ranks.of(ranks_that_differ)["2"]
    assert without.startswith("ConfigError: zero_optimization.stage = 2 without an optimizer")
    assert with_one.startswith("RankDesyncError: this rank stops because others did: rank 1 raised ConfigError: zero")


def test_ranks_whose_optimizers_come_from_different_places_are_refused(two_ranks):
    for told in two_ranks.of(ranks_that_differ)["other"]:
        assert 'rank 0 has "optimizer="; rank 1 has "the section `optimizer`"' in told


def test_ranks_go_on_together_after_a_refusal(two_ranks):
    assert two_ranks.of(ranks_that_differ)["goes on"][0] == 1
