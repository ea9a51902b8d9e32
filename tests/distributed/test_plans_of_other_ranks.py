"""A plan for another number of ranks is refused on every rank: in part it would train on, without a word."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_one_rank

pytestmark = pytest.mark.ranks


def _planned(ranks):
    rollouts = shorten(load_rollouts()[:24], 64)
    return ds_parity.plan(rollouts, dp_world_size=ranks, target=8, max_tokens=200)


def _stream(ranks):
    """The micro-batches of this rank in a plan for so many, as `micro_batches` makes them."""
    for chosen in _planned(ranks).of_rank(min(dist.get_rank(), ranks - 1)):
        units = [load_rollouts()[index] for index in chosen.tolist()]
        yield replace(ds_parity.collate(units), planned_for=ranks)


def _trained(engine, stream, **options):
    for _ in engine.passes(stream, **options):
        one_pass(engine, 1)


@on_one_rank
def planned_for_more_than_one(folder):
    engine = build(config(1, passes=8))
    return {
        "passes": from_all(refusal(lambda: _trained(engine, _stream(2)))),
        "micro_batches": from_all(refusal(lambda: list(ds_parity.micro_batches(_planned(2), 0)))),
    }


@at_length_on_two_ranks
def planned_for_other_ranks(folder):
    results = {}
    for stage in STAGES:
        for ahead in (0, 3):
            engine = build(config(stage, passes=8, exchange_timeout=20))
            before = weights.vector(engine.module)
            for ranks in (1, 4):
                told = refusal(lambda: _trained(engine, _stream(ranks), lookahead=ahead))  # noqa: B023  # called here
                results[f"{stage} {ahead} {ranks}"] = from_all(told)
            untouched = torch.equal(before, weights.vector(engine.module)) and engine.window.passes == 0
            # The same engine goes on with a plan for as many ranks as there are.
            planned = _planned(2)
            _trained(engine, ds_parity.micro_batches(planned, dist.get_rank()), lookahead=ahead)
            results[f"{stage} {ahead}"] = {"untouched": untouched, "steps": engine.global_steps}
    own = refusal(lambda: list(ds_parity.micro_batches(_planned(4), dist.get_rank())))
    few = refusal(lambda: list(ds_parity.micro_batches(_planned(1), dist.get_rank())))
    return {**results, "more than processes": from_all(own), "fewer": from_all(few)}


TOLD = r"ConfigError: a micro-batch that passes\(\) has read is of a plan for {} data-parallel ranks, and {} train:"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["0", "3"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_passes_refuse_it_on_every_rank(two_ranks_at_length, stage, ahead, ranks):
    for told in two_ranks_at_length.of(planned_for_other_ranks)[f"{stage} {ahead} {ranks}"]:
        assert re.match(TOLD.format(ranks, 2), told)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["0", "3"])
def test_nothing_of_it_is_counted_and_the_right_plan_is_trained_on(two_ranks_at_length, stage, ahead):
    assert two_ranks_at_length.of(planned_for_other_ranks)[f"{stage} {ahead}"] == {"untouched": True, "steps": 3}


@pytest.mark.slow
def test_more_ranks_than_processes_are_refused_where_micro_batches_are_made(two_ranks_at_length):
    for told in two_ranks_at_length.of(planned_for_other_ranks)["more than processes"]:
        assert told.startswith("ConfigError: the plan is for 4 data-parallel ranks, but 2 processes train")


@pytest.mark.slow
def test_a_rank_that_a_plan_does_not_have_is_refused_with_the_way_out(two_ranks_at_length):
    first, second = two_ranks_at_length.of(planned_for_other_ranks)["fewer"]
    assert first == "nothing was raised"
    assert re.match(r"ConfigError: rank 1: the plan is for 1 data-parallel ranks.*; plan with dp_world_size=", second)


def test_one_rank_refuses_a_plan_for_two(one_rank):
    result = one_rank.of(planned_for_more_than_one)
    assert re.match(TOLD.format(2, 1), result["passes"][0])
    assert "but 1 processes train" in result["micro_batches"][0]
