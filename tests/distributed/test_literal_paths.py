"""Folders and tags of checkpoints whose names DeepSpeed reads as patterns: each load finds its own."""

import pytest
import torch

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
# What is saved, one after the other, and what is loaded: each with a neighbour which its name matches as a pattern.
PLACES = [("run1", "t"), ("run[1]", "t"), ("run1", "[t]"), ("run?", "t*"), ("run[1]", "t[!a]")]


@on_two_ranks
def literal_paths(folder):
    """By stage and place: the steps that the loaded checkpoint has, or what the load ends in."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, "fp32", 2))
        for root, tag in PLACES:
            one_pass(engine, 0)
            engine.save_checkpoint(f"{folder}/{stage}/{root}", tag=tag, client_state={"place": f"{root}/{tag}"})
        for root, tag in PLACES:
            loading, state = build(config(stage, "fp32", 2)), {}
            said = refusal(
                lambda loading=loading, root=root, tag=tag, stage=stage, state=state: state.update(
                    loading.load_checkpoint(f"{folder}/{stage}/{root}", tag=tag)[1]
                )
            )
            found[f"{stage} {root}/{tag}"] = [said, state.get("place"), loading.global_steps]
    torch.distributed.barrier()
    return from_all(found)


@pytest.mark.parametrize("place", ["/".join(place) for place in PLACES])
def test_a_load_finds_the_checkpoint_of_its_own_name(two_ranks, stage, place):
    steps = ["/".join(place) for place in PLACES].index(place) + 1
    for found in two_ranks.of(literal_paths):
        assert found[f"{stage} {place}"] == ["nothing was raised", place, steps]
