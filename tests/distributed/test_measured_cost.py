"""A cost that was measured on an engine is the same on every rank, and training goes on as if nothing had been run."""

import pytest
import torch

import ds_parity
from ds_parity.parity.data.model import build
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from tests.distributed.cells import config
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROLLOUTS = shorten(load_rollouts(), 200)[:64]
SHORT = shorten(load_rollouts(), 60)[:8]


def loss_of(model, one):
    logits = model(one.inputs["input_ids"], position_ids=one.inputs["position_ids"])
    return logits.float().logsumexp(-1).mean()


def trained(stage, *, measuring):
    """The cost (or what was refused), and the weights' norm after two windows."""
    model = build(0)
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config(stage, passes=4))
    batches = [ds_parity.collate(some, layout="packed") for some in (ROLLOUTS[:1], SHORT[:1], SHORT)]
    said, cost, random = None, None, torch.get_rng_state()
    for one in ds_parity.collate(ROLLOUTS[9:11], layout="packed"), *[batches[0]] * 7:
        if measuring and engine.window.passes == 0 and cost is None and said is None:
            said = refusal(lambda: costs.append(ds_parity.measure_cost(engine, batches, loss_of, repeats=2)))
            cost = costs[-1] if costs else None
        engine.backward(loss_of(engine, one), rollouts=1, tokens=3)
        if measuring and engine.window.passes == 1:
            said = refusal(lambda: ds_parity.measure_cost(engine, batches, loss_of))
        engine.step()
    return {
        "cost": None if cost is None else (cost.per_token, cost.per_square, cost.per_pass),
        "said": said,
        "step": (engine.last_step.step, engine.last_step.loss, engine.last_step.grad_norm),
        "random": torch.equal(random, torch.get_rng_state()),
    }


costs = []


@at_length_on_two_ranks
def measured(folder):
    seen = {}
    for stage in (0, 1, 2, 3):
        costs.clear()
        seen[str(stage)] = [from_all(trained(stage, measuring=measuring)) for measuring in (False, True)]
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_it_is_the_same_on_every_rank_and_changes_no_step(two_ranks_at_length, stage):
    without, with_it = two_ranks_at_length.of(measured)[str(stage)]
    assert [one["step"] for one in with_it] == [one["step"] for one in without]
    assert with_it[0]["cost"] == with_it[1]["cost"]
    per_token, per_square, per_pass = with_it[0]["cost"]
    assert min(per_token, per_square, per_pass) >= 0
    assert per_token + per_square > 0
    assert all(one["random"] for one in with_it)
    assert "a window is open after 1 passes" in with_it[0]["said"]


def test_divided_parameters_are_refused_on_every_rank(two_ranks_at_length):
    for one in two_ranks_at_length.of(measured)["3"][1]:
        assert one["cost"] is None
