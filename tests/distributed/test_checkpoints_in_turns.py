"""Universal checkpoints and `round_robin_gradients`: DeepSpeed's converter gives weights to other parameters.

tools/deepspeed_faults/universal_in_turns.py shows it on bare DeepSpeed.
"""

from itertools import product

import pytest
import torch

from ds_parity.parity.running import weights
from tests.distributed.continuing import converted, extended, windows_of
from tests.distributed.engines import build, from_all, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
STAGES = (1, 2)
# Whether the run that saved, and the one that loads, deals parameters to the ranks in turns.
SETTINGS = list(product((False, True), repeat=2))


def _made(stage, in_turns, *, universal=False):
    made = extended(stage, "fp32", {}, loss_weight="rollout")
    made["zero_optimization"] = {"stage": stage, "round_robin_gradients": in_turns}
    return {**made, "checkpoint": {"load_universal": True}} if universal else made


@on_two_ranks
def universal_in_turns(folder):
    """By stage and settings: what loading ends in, and whether the weights are then those that were saved."""
    results = {}
    for stage, saved in product(STAGES, (False, True)):
        engine, path = build(_made(stage, saved)), f"{folder}/{stage}-{saved}"
        windows_of(engine, [3, 3])
        engine.save_checkpoint(path)
        assert converted(path, 1) == ("nothing was raised" if not torch.distributed.get_rank() else None)
        for loads in (False, True):
            other = build(_made(stage, loads, universal=True))
            said = refusal(lambda other=other, path=path: other.load_checkpoint(path))
            alike = torch.equal(weights.vector(engine.module), weights.vector(other.module))
            results[f"{stage} {saved} {loads}"] = from_all([said, alike])
    return results


@pytest.mark.parametrize(("saved", "loads"), SETTINGS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_universal_checkpoint_is_loaded_right_or_refused_on_every_rank(two_ranks, stage, saved, loads):
    for said, alike in two_ranks.of(universal_in_turns)[f"{stage} {saved} {loads}"]:
        if saved or loads:
            assert said.startswith("CheckpointError: ")
            assert "zero_optimization.round_robin_gradients" in said
        else:
            assert (said, alike) == ("nothing was raised", True)
