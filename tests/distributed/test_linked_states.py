"""`safe_get_full_optimizer_state` behind steps, loads and reloads: the states that the optimizer steps with."""

from itertools import product

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SUMMED = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
KINDS = {
    "1": (1, {}),
    "1 summed": (1, SUMMED),
    "2": (2, {}),
    "2 offloaded": (2, {**OFFLOADED, "zero_force_ds_cpu_optimizer": False}),
}
CELLS = [f"{kind}, groups: {groups}" for kind, groups in product(KINDS, (1, 2))]


def _engine(kind, groups, seed=0):
    stage, more = KINDS[kind]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    groups = [{"params": one} for one in layers] if groups == 2 else [{"params": layers[0] + layers[1]}]
    made = {**config(stage, passes=2, exchange_timeout=60), **more}
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    return ds_parity.initialize(model=model, model_parameters=groups, config=made)[0]


def _window(engine, seed):
    kind = next(engine.module.parameters()).dtype
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device, kind)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def _states(engine):
    """The first moments of all parameters; every rank calls, and where one raised, the others would wait."""
    parameters = list(engine.module.parameters())
    mappings = [one._hp_mapping for one in parameters]
    there = [mapping is None or "exp_avg" in (mapping.optim_fragment or {}) for mapping in mappings]
    if not all(one for rank in from_all(there) for one in rank):
        return "a rank has none"
    return [safe_get_full_optimizer_state(one, "exp_avg").flatten().tolist() for one in parameters]


def _read(folder, kind, groups):
    engine, found = _engine(kind, groups), {}
    _window(engine, 0)
    found["first"] = _states(engine)
    engine.save_checkpoint(folder, tag="first")
    _window(engine, 1)
    found["second"] = _states(engine)
    for name, one in (("used", engine), ("new", _engine(kind, groups, seed=1))):
        one.load_checkpoint(folder, tag="first")
        found[f"{name}, loaded"] = _states(one)
        _window(one, 1)
        found[f"{name}, trained"] = _states(one)
        one.destroy()
    return found


def _reloaded(stage):
    """First moments behind a window, where states have left and come back as on a device: in tensors of their own."""
    found = {}
    for moves in (False, True):
        engine = _engine(stage, 2)
        _window(engine, 0)
        if moves:
            engine.offload_states(pin_memory=False)
            optimizer = engine.optimizer.optimizer
            for one, values in optimizer.state.items():
                optimizer.state[one] = {name: value.clone() for name, value in values.items()}
            engine.reload_states()
        _window(engine, 1)
        found[moves] = _states(engine)
        engine.destroy()
    return found[False], found[True]


@at_length_on_two_ranks
def reloads(folder):
    return from_all({stage: _reloaded(stage) for stage in ("1", "2")})


@pytest.mark.parametrize("stage", ["1", "2"])
def test_states_that_come_back_in_other_tensors_are_linked_again(two_ranks_at_length, stage):
    for found in two_ranks_at_length.of(reloads):
        kept, reloaded = found[stage]
        assert kept == reloaded
        assert len(kept) == 4


@at_length_on_two_ranks
def states(folder):
    cells = {cell: cell.split(", groups: ") for cell in CELLS}
    return from_all({cell: _read(f"{folder}/{cell}", kind, int(groups)) for cell, (kind, groups) in cells.items()})


@pytest.mark.parametrize("cell", CELLS)
class TestStates:
    """On ZeRO 1 and 2, with one parameter group and with two."""

    def test_they_are_there_behind_the_first_step(self, two_ranks_at_length, cell):
        for found in two_ranks_at_length.of(states):
            first, second = found[cell]["first"], found[cell]["second"]
            assert len(first) == len(second) == 4
            assert first != second
            assert all(any(one) for one in first)

    @pytest.mark.parametrize("engine", ["used", "new"])
    def test_they_are_those_of_the_checkpoint_behind_a_load(self, two_ranks_at_length, cell, engine):
        for found in two_ranks_at_length.of(states):
            assert found[cell][f"{engine}, loaded"] == found[cell]["first"]
            assert found[cell][f"{engine}, trained"] == found[cell]["second"]
