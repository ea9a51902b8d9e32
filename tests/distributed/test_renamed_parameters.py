"""A checkpoint whose parameters have other names here, in the same places, loaded with load_module_strict=False."""

import pytest
import torch

import ds_parity
from ds_parity.all_weights import every_stored
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.distributed.cells import config
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
FP16 = {"fp16": {"enabled": True, "loss_scale": 64}}
# On ZeRO 0 in fp32 the model's weights are those that the optimizer steps, and are loaded by their names.
CELLS = {
    **{f"{stage} {name}": (stage, name, keys) for stage in (1, 2, 3) for name, keys in (("fp32", {}), ("bf16", {}))},
    **{f"{stage} fp16": (stage, "fp32", FP16) for stage in (0, 1, 2, 3)},
    "0 bf16": (0, "bf16", {}),
    "1 accumulated": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "2 offload": (2, "fp32", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
}


class _Model(torch.nn.Module):
    """Two layers, of which the second may have another name, or another shape of as many weights."""

    def __init__(self, *, name="head", shape=(2, 6), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 8)
        self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
        self.name = name

    def forward(self, x):
        """Return one number."""
        return self.first(x).float().pow(2).mean() + getattr(self, self.name).float().pow(2).sum()


def _engine(stage, dtype, keys, **made):
    extended = {**config(stage, dtype, 2, "AdamW"), "zero_force_ds_cpu_optimizer": False, **keys}
    return ds_parity.initialize(model=_Model(**made), config=extended)[0]


def _step(engine, seed):
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x.to(engine.device, next(engine.module.parameters()).dtype)), rollouts=1)
    engine.step()


def _weights(engine):
    return [stored for _, stored in every_stored(engine.module)]


@on_two_ranks
def renamed(folder):
    """By cell: whether the weights are those that were saved, and go on as there; and what other shapes end in."""
    found = {}
    with fp16_allowed():
        for name, cell in CELLS.items():
            path = f"{folder}/renamed-{name.replace(' ', '-')}"
            saved, other = _engine(*cell), _engine(*cell, name="tail", seed=1)
            for seed in (1, 2):
                _step(saved, seed)
            saved.save_checkpoint(path)
            other.load_checkpoint(path, load_module_strict=False)
            loaded = _alike(saved, other)
            for one in (saved, other):
                _step(one, 3)
            shaped = _engine(*cell, name="tail", shape=(3, 4))
            said = refusal(lambda: shaped.load_checkpoint(path, load_module_strict=False))  # noqa: B023
            found[name] = [loaded, _alike(saved, other), said]
    return from_all(found)


def _alike(one, other):
    return all(map(torch.equal, _weights(one), _weights(other)))


@pytest.mark.parametrize("cell", CELLS)
def test_the_first_window_is_of_the_weights_that_were_saved(two_ranks, cell):
    for found in two_ranks.of(renamed):
        assert found[cell][:2] == [True, True]


@pytest.mark.parametrize("cell", CELLS)
def test_another_shape_in_the_same_place_is_refused(two_ranks, cell):
    for found in two_ranks.of(renamed):
        # On ZeRO 0 states come one by one, so that DeepSpeed itself raises.
        said = "" if cell.startswith("0") else "the parameter 'tail' has the shape (2, 6) in the checkpoint"
        assert found[cell][2].startswith(f"CheckpointError: {said}")
