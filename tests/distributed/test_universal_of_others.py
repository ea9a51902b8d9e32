"""Universal checkpoints of another model, or of other parameter groups, which DeepSpeed loads without an error."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STAGES = (1, 2, 3)


class _Model(torch.nn.Module):
    """A matrix and a bias, and one more number, if wanted."""

    def __init__(self, shape=(4, 6), *, more=False):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(shape))
        self.bias = torch.nn.Parameter(torch.randn(6))
        if more:
            self.more = torch.nn.Parameter(torch.ones(3))

    def forward(self):
        return sum(one.float().pow(2).sum() for one in self.parameters())


def _decayed(model):
    return {"params": [model.matrix], "weight_decay": 0.1}


def _others(model):
    return {"params": [one for name, one in model.named_parameters() if name != "matrix"], "lr": 5e-3}


def _two(model):
    return [_decayed(model), _others(model)]


SAME = {"the same": (_Model, _two), "sub-groups": (_Model, _two)}
OTHER = {
    "reversed": (_Model, lambda model: [_others(model), _decayed(model)]),
    "one group": (_Model, lambda model: list(model.parameters())),
    "another shape": (lambda: _Model((6, 4)), _two),
    "a longer shape": (lambda: _Model((8, 3)), _two),
}


def _engine(stage, made, groups, **zero):
    model = made()
    keys = {**config(stage, "fp32", 2, "AdamW"), "checkpoint": {"load_universal": True}}
    keys["zero_optimization"] |= zero
    del keys["scheduler"]
    return ds_parity.initialize(model=model, model_parameters=groups(model), config=keys)[0]


def _saved(stage, folder, **options):
    engine = _engine(stage, lambda: _Model(**options), _two)
    engine.backward(engine(), rollouts=1)
    engine.step()
    engine.save_checkpoint(folder)
    said = converted(folder, 1)
    assert said in (None, "nothing was raised"), said


@at_length_on_two_ranks
def universal_of_others(folder):
    """By stage and case: what each rank's load ends in."""
    results = {}
    for stage in STAGES:
        path, longer = f"{folder}/others-{stage}", f"{folder}/longer-{stage}"
        _saved(stage, path)
        _saved(stage, longer, more=True)
        for name, (made, groups) in {**SAME, **OTHER}.items():
            zero = {"sub_group_size": 7} if name == "sub-groups" and stage == 3 else {}
            results[f"{stage} {name}"] = _ended(_engine(stage, made, groups, **zero), path)
        results[f"{stage} a parameter less"] = _ended(_engine(stage, _Model, _two), longer)
    return results


def _ended(engine, path):
    said = from_all(refusal(lambda: engine.load_checkpoint(path)))
    dist.barrier()
    return said


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_groups_are_loaded(two_ranks_at_length, stage, name):
    assert two_ranks_at_length.of(universal_of_others)[f"{stage} {name}"] == ["nothing was raised"] * 2


@pytest.mark.parametrize("name", [*OTHER, "a parameter less"])
@pytest.mark.parametrize("stage", STAGES)
def test_others_are_refused_on_every_rank(two_ranks_at_length, stage, name):
    for said in two_ranks_at_length.of(universal_of_others)[f"{stage} {name}"]:
        assert said.startswith(("CheckpointError: the universal checkpoint", "CheckpointError: the parameter 'matrix'"))
