"""Losses that bring weights of their own, or that their caller has divided: steps as an oracle in fp64 says."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, perceptron, refusal
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_loop_shapes import RATE, extended, loss_of, sample, weights

pytestmark = pytest.mark.ranks

# Weight and rollouts by window, rank and backward: each window has five rollouts; one weighs nothing at all.
WINDOWS = (
    (((0.25, 1), (3.5, 2)), ((0.125, 1), (1e-3, 1))),
    (((1.75, 2), (0.0, 1)), ((2.0, 1), (0.3, 1))),
    (((0.0, 1), (0.0, 1)), ((0.0, 2), (0.0, 1))),
    (((7.0, 1), (0.1, 1)), ((0.0, 2), (0.2, 1))),
)
SECTIONS = {
    "weight": {"loss_weight": "weight"},
    "weight, summed": {"loss_weight": "weight", "loss_reduction": "sum"},
    "divided, sum": {"loss_weight": "divided", "across_ranks": "sum"},
    "divided, mean": {"loss_weight": "divided", "across_ranks": "mean"},
}
BOUNDARIES = ("rollouts", "caller")


def engine_of(stage, **section):
    config = {**extended(stage), "gradient_accumulation_passes": 5, "ds_parity": section}
    model = perceptron()
    client = torch.optim.SGD(model.parameters(), lr=RATE)
    return ds_parity.initialize(model=model, model_parameters=model.parameters(), optimizer=client, config=config)[0]


def own(rank):
    """Of one rank, window by window: seed, weight and rollouts of each backward."""
    return [[(100 * w + 10 * n + rank, *one) for n, one in enumerate(ranks[rank])] for w, ranks in enumerate(WINDOWS)]


def total(window):
    return sum(weight for rank in WINDOWS[window] for weight, _ in rank)


def factor(name, window, weight):
    """What the caller multiplies a loss by, before it goes in."""
    if name == "weight, summed":
        return weight
    if not name.startswith("divided"):
        return 1.0
    share = weight / (total(window) or 1.0)
    return share * (2 if name.endswith("mean") else 1)


def hand_out(engine, name, lookahead):
    """The weights of micro-batches that passes() hands out are their own."""
    windows = own(dist.get_rank())
    stream = [
        ds_parity.MicroBatch(inputs={"seed": seed, "window": w}, rollouts=rollouts, weight=weight)
        for w, window in enumerate(windows)
        for seed, weight, rollouts in window
    ]
    for one in engine.passes(stream, lookahead=lookahead):
        loss = loss_of(engine, engine, one.inputs["seed"])
        engine.backward(loss * factor(name, one.inputs["window"], one.weight))
        engine.step()


def train(engine, name, *, by_caller):
    for number, window in enumerate(own(dist.get_rank())):
        for seed, weight, rollouts in window:
            loss = factor(name, number, weight) * loss_of(engine, engine, seed)
            given = {} if name.startswith("divided") else {"weight": weight}
            engine.backward(loss, rollouts=rollouts, **given)
            if not by_caller:
                engine.step()
        if by_caller:
            engine.step()


def oracle():
    """The steps in float64 on one process."""
    model = perceptron().double()
    for number in range(len(WINDOWS)):
        parts = [one for rank in range(2) for one in own(rank)[number]]
        if not total(number):
            continue
        losses = [weight * model(sample(seed, torch.float64).cpu()).pow(2).mean() for seed, weight, _ in parts]
        gradients = torch.autograd.grad(sum(losses) / total(number), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return [p.detach().flatten().tolist() for p in model.parameters()]


BAD = {
    "no weight": {},
    "NaN": {"weight": float("nan")},
    "infinite": {"weight": float("inf")},
    "negative": {"weight": -1.0},
    "a flag": {"weight": True},
    "off the CPU": {"weight": torch.zeros((), device="meta")},
}


@on_two_ranks
def losses_with_weights(folder):
    """By section, boundary and stage: the weights, and the last step's loss and total."""
    results = {"oracle": oracle()}
    for stage in STAGES:
        for boundary in BOUNDARIES:
            for name, section in SECTIONS.items():
                engine = engine_of(stage, boundary=boundary, **section)
                train(engine, name, by_caller=boundary == "caller")
                last = engine.last_step
                results[f"{stage} {boundary} {name}"] = [weights(engine), last.loss, last.total, last.step]
                engine.destroy()
        for lookahead in (0, 3):
            engine = engine_of(stage, loss_weight="weight")
            hand_out(engine, "weight", lookahead)
            last = engine.last_step
            results[f"{stage} passes {lookahead}"] = [weights(engine), last.loss, last.total, last.step]
            engine.destroy()
    for name, given in BAD.items():
        engine = engine_of(2, loss_weight="weight")
        bad = {"weight": 1.0} if dist.get_rank() else given
        loss = loss_of(engine, engine, 1)
        results[name] = from_all(refusal(lambda e=engine, b=bad, v=loss: e.backward(v, rollouts=1, **b)))
        engine.destroy()
    engine = engine_of(2, loss_weight="token")
    loss = loss_of(engine, engine, 1)
    results["not asked for"] = from_all(refusal(lambda: engine.backward(loss, rollouts=1, tokens=1, weight=1.0)))
    engine.destroy()
    return results


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_divided_losses_step_as_the_oracle_does(two_ranks, stage, boundary, name):
    results = two_ranks.of(losses_with_weights)
    trained, loss, divided_by, steps = results[f"{stage} {boundary} {name}"]
    # A window of losses that are divided already holds no weight that could be 0; its losses are 0.
    assert steps == len(WINDOWS)
    for right, values in zip(results["oracle"], trained, strict=True):
        assert values == pytest.approx(right, abs=3e-7)
    assert divided_by == pytest.approx({"divided, sum": 1, "divided, mean": 2}.get(name, total(-1)), rel=1e-12)
    assert loss == pytest.approx(results[f"{stage} rollouts weight"][1], rel=1e-5)


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_of_passes_bring_their_weights(two_ranks, stage, lookahead):
    results = two_ranks.of(losses_with_weights)
    trained, _, divided_by, steps = results[f"{stage} passes {lookahead}"]
    assert (steps, divided_by) == (len(WINDOWS), pytest.approx(total(-1), rel=1e-12))
    for right, values in zip(results["oracle"], trained, strict=True):
        assert values == pytest.approx(right, abs=3e-7)


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_weight_is_refused_on_every_rank(two_ranks, name):
    said = two_ranks.of(losses_with_weights)[name]
    assert said[0].startswith("WindowError: ")
    assert "weight" in said[0]
    assert said[1].startswith("RankDesyncError: "), said
    assert "weight" in said[1]


def test_a_weight_where_nothing_is_weighed_by_it_is_refused(two_ranks):
    said = two_ranks.of(losses_with_weights)["not asked for"]
    assert all("although ds_parity.loss_weight is 'token'" in one for one in said), said
