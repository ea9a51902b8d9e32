"""A count that one rank gives and another leaves out is an error on both: the usual number would stand for it."""

import pytest
import torch.distributed as dist

from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, forward, from_all, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
BOUNDARIES = ("rollouts", "caller")


def _run(engine, boundary, given):
    """Run passes with the counts of each, None for an idle one, and step in the last; the rollouts of the record."""
    for index, counts in enumerate(given):
        if counts is None:
            engine.idle(forward(engine, index))
        else:
            engine.backward(forward(engine, index), **counts)
        if boundary == "rollouts" or index == len(given) - 1:
            engine.step()
    engine.finish()
    return engine.last_step.rollouts


CASES = {
    "left out in the first pass": [[{}, {"rollouts": 3}], [{"rollouts": 3}, {"rollouts": 3}]],
    "never given": [[{}, {}], [{"rollouts": 3}, {"rollouts": 3}]],
    "idle": [[None, {"rollouts": 3}], [{"rollouts": 3}, {"rollouts": 3}]],
    "idle, then left out by both": [[None, {}], [{}, {}]],
    "given by both from the second pass on": [[{}, {"rollouts": 3}], [{}, {"rollouts": 3}]],
    "left out by one, in turns": [[{}, None], [None, {"rollouts": 3}]],
}
"""By name: the counts of two passes on each of the ranks."""
RIGHT = {"idle": 9, "idle, then left out by both": 6, "given by both from the second pass on": 10}
"""How many rollouts the ones have that nobody refuses; the usual number is 2."""


@on_two_ranks
def counts_of_one_rank(folder):
    """By boundary and case: what it ends in, or how many rollouts were counted."""
    results = {}
    for boundary in BOUNDARIES:
        for name, ranks in CASES.items():
            made = config(2, passes=100, boundary=boundary, last_window="step", exchange_timeout=60)
            engine, counted = build({**made, "train_micro_batch_size_per_gpu": 2}), []
            passes = ranks[dist.get_rank()]
            said = refusal(lambda: counted.append(_run(engine, boundary, passes)))  # noqa: B023
            results[f"{boundary}, {name}"] = [said, *counted]
    return from_all(results)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("name", CASES)
def test_rollouts_are_given_for_all_micro_batches_or_for_none(two_ranks, boundary, name):
    for results in two_ranks.of(counts_of_one_rank):
        found = results[f"{boundary}, {name}"]
        if name in RIGHT:
            assert found == ["nothing was raised", RIGHT[name]]
        else:
            (said,) = found
            assert said.startswith(
                "RankDesyncError: rollouts= is left out on rank 0, and given on others, in one window"
            )


def _mixed(engine):
    """A window that is refused: the first rank leaves its rollouts out."""
    engine.backward(forward(engine, 0), **({"rollouts": 2} if dist.get_rank() else {}))
    engine.step()


@on_two_ranks
def counts_behind_a_load(folder):
    """By boundary: a mixed window, and the loop put right behind a load, where one rank has no micro-batch."""
    results = {}
    for boundary in BOUNDARIES:
        engine = build(config(2, passes=100, boundary=boundary, last_window="step", exchange_timeout=60))
        engine.save_checkpoint(folder, tag=boundary)
        said = refusal(lambda: _mixed(engine))  # noqa: B023
        engine.load_checkpoint(folder, tag=boundary)
        rollouts = _run(engine, boundary, [{"rollouts": 2}] if dist.get_rank() else [None])
        results[boundary] = said, rollouts
        engine.destroy()
    return from_all(results)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_behind_a_load_a_loop_is_asked_by_its_new_window_alone(two_ranks, boundary):
    for results in two_ranks.of(counts_behind_a_load):
        said, rollouts = results[boundary]
        assert said.startswith("RankDesyncError: rollouts= is left out on rank 0")
        assert rollouts == 2


@on_two_ranks
def counts_of_a_stream(folder):
    """By boundary: the first rank has micro-batches of passes(), and behind it the second one has one of its own."""
    results = {}
    for boundary in BOUNDARIES:
        engine = build(config(2, passes=100, boundary=boundary, last_window="step", exchange_timeout=60))
        stream = [] if dist.get_rank() else [Batch(rollouts=2), Batch(rollouts=2)]
        for _ in engine.passes(stream, idle=Batch(), finish=False):
            engine.backward(forward(engine, 0))
            if boundary == "rollouts":
                engine.step()
        results[boundary] = _run(engine, boundary, [{}] if dist.get_rank() else [None])
        engine.destroy()
    return from_all(results)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_micro_batches_of_passes_are_neither_given_nor_left_out(two_ranks, boundary):
    for results in two_ranks.of(counts_of_a_stream):
        assert results[boundary] == 2 * 2 + 1
