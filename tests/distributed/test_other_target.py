"""Weights of a run that counted towards another target, with which a new run begins; and a `latest` without a name."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.saving import KEY
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}


@on_two_ranks
def other_targets(folder):
    """By stage: what is raised with and without the optimizer's states, and whether weights came and counts stayed."""
    results = {}
    for stage in STAGES:
        engine = build(config(stage, passes=2))
        for seed in range(4):
            one_pass(engine, seed, rollouts=1)
        engine.save_checkpoint(f"{folder}/{stage}")
        saved = weights.vector(engine.module)
        other = build(config(stage, passes=3))
        whole = refusal(lambda e=other, s=stage: e.load_checkpoint(f"{folder}/{s}"))
        other = build(config(stage, passes=3))
        alone = refusal(lambda e=other, s=stage: e.load_checkpoint(f"{folder}/{s}", **ALONE))
        came = torch.equal(saved, weights.vector(other.module))
        counts = [other.global_steps, other.window.index, other.window.target]
        for seed in range(6):
            one_pass(other, seed, rollouts=1)
        results[str(stage)] = from_all([whole, alone, came, counts, other.global_steps])
    return results


@on_two_ranks
def nameless(folder):
    engine = build(config(2, passes=2))
    engine.save_checkpoint(f"{folder}/nameless")
    Path(f"{folder}/nameless/latest").write_text("\n")
    return from_all(refusal(lambda: engine.load_checkpoint(f"{folder}/nameless")))


@on_two_ranks
def other_states(folder):
    """What is raised for states of ds_parity that it has not written."""
    engine, said = build(config(1, passes=2)), {}
    engine.save_checkpoint(f"{folder}/states", tag="whole")
    file = Path(f"{folder}/states/whole/mp_rank_00_model_states.pt")
    for name, state in (("other", {"rubbish": 1}), ("part", {"target": 2, "count": "rollout"})):
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(torch.load(file, weights_only=False) | {KEY: state}, file)
        dist.barrier()
        loading = build(config(1, passes=2))
        said[name] = from_all(refusal(lambda e=loading: e.load_checkpoint(f"{folder}/states", tag="whole")))
    return said


@pytest.mark.parametrize(("name", "lacks"), [("other", "target, count, passes"), ("part", "passes, windows")])
def test_a_state_that_was_not_written_so_is_said(two_ranks, name, lacks):
    for result in two_ranks.of(other_states)[name]:
        assert result.startswith(f"CheckpointError: the state of ds_parity in the checkpoint has no {lacks}"), result


@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_begin_a_run_with_another_target(two_ranks, stage):
    for whole, alone, came, counts, steps in two_ranks.of(other_targets)[str(stage)]:
        assert whole.startswith("CheckpointError: the checkpoint was counting towards a target of ")
        assert "load_optimizer_states=False and load_lr_scheduler_states=False" in whole
        assert (alone, came) == ("nothing was raised", True)
        assert counts[:2] == [4, 4]
        assert steps > counts[0]


def test_a_file_latest_without_a_name_is_said(two_ranks):
    for said in two_ranks.of(nameless):
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert "can't be read on rank 0 (the file is empty), rank 1 (the file is empty). Nothing was loaded" in said
