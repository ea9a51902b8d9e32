"""A save under a tag of which a run on another ZeRO stage has saved: none of its files stay."""

from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ds_parity
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PAIRS = {f"{first} before {second}": (first, second) for first, second in permutations(STAGES, 2)}


class _Numbered(torch.nn.Module):
    """All its weights, and its buffer, are one number."""

    def __init__(self, number):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, number)
        self.register_buffer("scale", torch.full((2,), float(number)))

    def forward(self, x):
        return self.layer(x)


def _engine(stage, number):
    model = _Numbered(number)
    return ds_parity.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage, passes=4, exchange_timeout=60)
    )[0]


def _saved(folder, stage, number):
    engine = _engine(stage, number)
    engine.save_checkpoint(folder, tag="the last")
    engine.destroy()
    dist.barrier()


def _files(folder):
    return sorted(file.name for file in Path(folder, "the last").glob("*.pt"))


@at_length_on_two_ranks
def stages_in_turns(folder):
    results, alone = {}, {}
    for stage in STAGES:
        _saved(f"{folder}/{stage}", stage, 1)
        alone[stage] = _files(f"{folder}/{stage}")
    for name, (first, second) in PAIRS.items():
        path = f"{folder}/{name}"
        _saved(path, first, 1)
        _saved(path, second, 2)
        found = results[name] = {"files": _files(path) == alone[second]}
        engine = _engine(first, 3)
        found["loaded"] = refusal(lambda e=engine, p=path: e.load_checkpoint(p))
        engine.destroy()
        if second:
            state = get_fp32_state_dict_from_zero_checkpoint(path, tag="the last")
            found["state"] = {key: sorted(set(value.flatten().tolist())) for key, value in state.items()}
    return from_all(results)


@pytest.mark.parametrize("pair", PAIRS)
class TestStagesInTurns:
    """The last save alone is there."""

    def test_the_files_are_those_of_the_last_save(self, two_ranks_at_length, pair):
        for found in two_ranks_at_length.of(stages_in_turns):
            assert found[pair]["files"]

    def test_the_stage_of_the_first_one_loads_nothing(self, two_ranks_at_length, pair):
        alike = set(PAIRS[pair]) == {1, 2}
        for found in two_ranks_at_length.of(stages_in_turns):
            assert found[pair]["loaded"].startswith("nothing was raised" if alike else "CheckpointError: ")

    def test_what_zero_to_fp32_gives_is_that_of_the_last_save(self, two_ranks_at_length, pair):
        if PAIRS[pair][1]:  # ZeRO 0 has no files for it
            for found in two_ranks_at_length.of(stages_in_turns):
                assert found[pair]["state"] == {"layer.weight": [2.0], "scale": [2.0]}
