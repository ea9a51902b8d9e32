"""Windows that the caller ends: as an oracle in fp64 says, and bit for bit as DeepSpeed driven by hand."""

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.engines import perceptron
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import CELLS, KINDS, RATE, extended, loss_of, sample, weights
from tests.older_refusals import skip_where_bare_is_wrong, wrong_when_bare

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Rollouts by window, rank and backward. All windows of the first plan have one total: nothing is corrected.
ALIKE = (((2, 1, 2), (3, 1, 1)), ((1, 4), (2, 3)), ((5,), (5,)))
OTHERS = (((2, 1), (1, 2)), ((7, 1, 1), (1, 2, 4)), ((0, 0), (0, 0)), ((0, 3), (2, 0)), ((1,), (1,)))
# ZeRO 0 and 1 take other numbers of backwards on each rank, none among them.
UNEVEN = (((2, 1), (4,)), ((7, 1, 1), ()), ((), (3,)), ((0,), ()), ((1, 1, 1, 1), (2, 9)))
PLANS = {"alike": ALIKE, "others": OTHERS, "uneven": UNEVEN}


def keyed(stage, kind, **section):
    """The configuration of an engine whose caller ends the windows, of nominally ten rollouts."""
    return {**extended(stage, kind), "ds_parity": {"boundary": "caller", **section}}


def bare_config(stage, kind):
    """The same for DeepSpeed itself."""
    config = extended(stage, kind)
    del config["gradient_accumulation_passes"]
    return {**config, "gradient_accumulation_steps": 5}


def engine_of(config):
    model = perceptron()
    client = torch.optim.SGD(model.parameters(), lr=RATE)
    start = ds_parity.initialize if "ds_parity" in config else deepspeed.initialize
    return start(model=model, model_parameters=model.parameters(), optimizer=client, config=config)[0]


def seeds(plan):
    """Of this rank, window by window: seed and rollouts of each backward."""
    rank = dist.get_rank()
    return [[(100 * w + 10 * n + rank, count) for n, count in enumerate(ranks[rank])] for w, ranks in enumerate(plan)]


def plain(engine, window):
    for seed, rollouts in window:
        engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
    engine.step()


def announced(engine, window):
    """The last backward is announced, as accelerate does it."""
    for seed, rollouts in window:
        engine.set_gradient_accumulation_boundary((seed, rollouts) == window[-1])
        engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
    engine.step()


def announced_twice(engine, window):
    """It is said before the backward and before `step()`, which a bare engine takes."""
    for seed, rollouts in window:
        last = (seed, rollouts) == window[-1]
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
        for again in (last, False, last):
            engine.set_gradient_accumulation_boundary(again)
            assert engine.is_gradient_accumulation_boundary() == again
    engine.step()


def handed_out(engine, windows, lookahead):
    """The same with passes(), which hands out the micro-batches of all windows."""
    ends = [one[-1] for one in windows]
    stream = [ds_parity.MicroBatch(inputs=one, rollouts=one[1]) for window in windows for one in window]
    for batch in engine.passes(stream, lookahead=lookahead):
        engine.backward(loss_of(engine, engine, batch.inputs[0]))
        if batch.inputs in ends:
            engine.step()


def by_hand(engine, window):
    """DeepSpeed driven by hand: losses divided, the boundary marked."""
    for number, (seed, rollouts) in enumerate(window):
        engine.set_gradient_accumulation_boundary(number == len(window) - 1)
        loss = loss_of(engine, engine, seed).float() / (10 / (2 * rollouts))
        engine.backward(loss, scale_wrt_gas=False)
        # Bare DeepSpeed adds only what it has seen a forward for, and steps at the boundary alone.
        engine.step()


def state_of(engine):
    last = engine.last_step
    return {
        "weights": weights(engine),
        "steps": (last.step, engine.global_steps, engine.micro_steps, engine.global_samples),
        "last": (last.passes, last.idle_passes, last.rollouts, last.total, last.skipped),
        "loss": last.loss,
    }


def oracle(plan):
    """The steps of a plan in float64 on one process."""
    model = perceptron().double()
    for w, ranks in enumerate(plan):
        parts = [(100 * w + 10 * n + r, count) for r, own in enumerate(ranks) for n, count in enumerate(own) if count]
        total = sum(count for _, count in parts)
        if not total:
            continue
        losses = [count * model(sample(seed, torch.float64).cpu()).pow(2).mean() for seed, count in parts]
        gradients = torch.autograd.grad(sum(losses) / total, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return [p.detach().flatten().tolist() for p in model.parameters()]


def run(config, plan, loop):
    engine = engine_of(config)
    for window in seeds(plan):
        loop(engine, window)
    state = state_of(engine)
    engine.destroy()
    return state


@at_length_on_two_ranks
def windows_that_callers_end(folder):
    """By cell: what loops of each shape come to."""
    results = {"oracle": {name: oracle(plan) for name, plan in PLANS.items()}}
    for stage, kind in CELLS:
        cell = {}
        if not wrong_when_bare(bare_config(stage, kind)):
            bare = engine_of(bare_config(stage, kind))
            for window in seeds(ALIKE):
                by_hand(bare, window)
            cell["by hand"] = weights(bare)
            bare.destroy()
        config = keyed(stage, kind)
        for name, plan in PLANS.items():
            if name != "uneven" or stage < 2:
                cell[name] = run(config, plan, plain)
        cell["announced"] = run(config, ALIKE, announced)
        cell["announced twice"] = run(config, ALIKE, announced_twice)
        for lookahead in (0, 3):
            engine = engine_of(config)
            handed_out(engine, seeds(ALIKE), lookahead)
            cell[f"passes {lookahead}"] = state_of(engine)
            engine.destroy()
        results[f"{stage} {kind}"] = cell
    return results


@pytest.mark.parametrize(("stage", "kind"), [cell for cell in CELLS if "bf16" not in KINDS[cell[1]]])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_the_oracle(two_ranks_at_length, stage, kind, plan):
    if plan == "uneven" and stage > 1:
        pytest.skip("ZeRO 2 and 3 talk to the other ranks in every backward")
    results = two_ranks_at_length.of(windows_that_callers_end)
    for right, own in zip(results["oracle"][plan], results[f"{stage} {kind}"][plan]["weights"], strict=True):
        assert own == pytest.approx(right, abs=2e-7)


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_the_same_bits_as_deepspeed_driven_by_hand(two_ranks_at_length, stage, kind):
    skip_where_bare_is_wrong(bare_config(stage, kind))
    cell = two_ranks_at_length.of(windows_that_callers_end)[f"{stage} {kind}"]
    assert cell["alike"]["weights"] == cell["by hand"]


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_the_same_bits_however_a_window_is_driven(two_ranks_at_length, stage, kind):
    cell = two_ranks_at_length.of(windows_that_callers_end)[f"{stage} {kind}"]
    assert cell["announced"] == cell["announced twice"] == cell["alike"]
    assert cell["passes 0"] == cell["passes 3"] == cell["alike"]
