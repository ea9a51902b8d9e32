"""Folders and tags of checkpoints whose names DeepSpeed reads as patterns: each load finds its own."""

import pytest
import torch

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
# What is saved, one after the other, and what is loaded: each with a neighbour which its name matches as a pattern.
PLACES = [("run1", "t"), ("run[1]", "t"), ("run1", "[t]"), ("run?", "t*"), ("run[1]", "t[!a]")]


def _loaded(stage, path, tag, **options):
    """What a load ends in, the client state that it returns, and the engine."""
    engine, state = build(config(stage, "fp32", 2)), {}
    said = refusal(lambda: state.update(engine.load_checkpoint(path, tag=tag, **options)[1]))
    return said, state, engine


@on_two_ranks
def literal_paths(folder):
    """By stage and place: what loads of all and of the weights alone end in, whether their weights are the same, and
    the place and the steps that the loaded checkpoint has."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, "fp32", 2))
        for root, tag in PLACES:
            one_pass(engine, 0)
            engine.save_checkpoint(f"{folder}/{stage}/{root}", tag=tag, client_state={"place": f"{root}/{tag}"})
        for root, tag in PLACES:
            said, state, whole = _loaded(stage, f"{folder}/{stage}/{root}", tag)
            flags = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
            of_weights, _, alone = _loaded(stage, f"{folder}/{stage}/{root}", tag, **flags)
            pairs = zip(whole.module.parameters(), alone.module.parameters(), strict=True)
            same = all(one.equal(other) for one, other in pairs)
            found[f"{stage} {root}/{tag}"] = [said, of_weights, same, state.get("place"), whole.global_steps]
    torch.distributed.barrier()
    return from_all(found)


@pytest.mark.parametrize("place", ["/".join(place) for place in PLACES])
def test_a_load_finds_the_checkpoint_of_its_own_name(two_ranks, stage, place):
    steps = ["/".join(place) for place in PLACES].index(place) + 1
    for found in two_ranks.of(literal_paths):
        assert found[f"{stage} {place}"] == ["nothing was raised", "nothing was raised", True, place, steps]
