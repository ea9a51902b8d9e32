"""A model that is converted to another type between windows: refused in a pass, and right once it is converted back."""

import pytest
import torch

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def converted(folder):
    """By stage: what a pass ends in behind `model.to(dtype)`, and how many steps there are once it is back."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, passes=2))
        one_pass(engine, 0)
        engine.module.to(torch.float64)
        engine.module.to(torch.float32)
        one_pass(engine, 1)
        steps = engine.last_step.step
        engine.module.to(torch.bfloat16)
        # Of ZeRO 3 the parameters are elsewhere, and stay as they were.
        there = next(engine.module.parameters()).dtype == torch.bfloat16
        said = refusal(lambda: _in_half(engine))  # noqa: B023
        found[str(stage)] = from_all([steps, there, said])
        engine.destroy()
    return found


def _in_half(engine):
    kind = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(3, 4, device=engine.device, dtype=kind)).float().pow(2).mean())


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_in_another_type_than_the_engines_is_refused(two_ranks, stage):
    for steps, there, said in two_ranks.of(converted)[str(stage)]:
        assert steps == 2
        if there:
            assert said.startswith("WindowError: ")
            assert "of torch.bfloat16 in window 2, and of torch.float32 when the engine was built" in said
        else:
            assert stage == 3
            assert said == "nothing was raised"


BF16 = {"bf16": {"enabled": True}}
SUMMED = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def _there_and_back(model):
    model.double()
    model.to(torch.bfloat16)


def _given_new_memory(model):
    for one in model.parameters():
        one.data = one.data.clone()


def _swapped_for_saving(model):
    """As an average of weights is swapped in, saved, and taken out again, by reference."""
    kept = [one.data for one in model.parameters()]
    for one in model.parameters():
        one.data = torch.zeros_like(one)
    yield
    for one, values in zip(model.parameters(), kept, strict=True):
        one.data = values


MOVES = {"not": lambda model: None, "converted": _there_and_back, "given new memory": _given_new_memory}


def _window(engine, seed, kind=torch.bfloat16):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device, kind)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()


def _flat(engine):
    return torch.cat([one.detach().float().flatten() for one in engine.module.parameters()]).tolist()


@on_two_ranks
def moved(folder):
    """By move: weights behind two windows and two more, and behind a load in whose window they were moved again."""
    found = {}
    for name, move in MOVES.items():
        engine = build({**config(1, passes=2), **SUMMED})
        weights = []
        for seed in range(4):
            if seed == 2:
                move(engine.module)
                engine.save_checkpoint(f"{folder}/{name}", tag="two")
            _window(engine, seed)
            weights.append(_flat(engine))
        move(engine.module)
        engine.load_checkpoint(f"{folder}/{name}", tag="two")
        loaded = _flat(engine)
        _window(engine, 2)
        found[name] = [weights, loaded, _flat(engine)]
        engine.destroy()
    engine = build({**config(1, passes=2), **SUMMED})
    _window(engine, 0)
    before, swap = _flat(engine), _swapped_for_saving(engine.module)
    next(swap)
    engine.save_checkpoint(f"{folder}/swapped", tag="zeros")
    next(swap, None)
    found["swapped"] = [before, _flat(engine)]
    engine.load_checkpoint(f"{folder}/swapped", tag="zeros", load_optimizer_states=False)
    found["swapped"] += [_flat(engine)]
    engine.destroy()
    return from_all(found)


@pytest.mark.parametrize("name", list(MOVES)[1:])
def test_weights_that_were_moved_and_came_back_are_trained_on(two_ranks, name):
    """ZeRO 1 in bf16, summed in fp32: bare DeepSpeed steps them no more."""
    for found in two_ranks.of(moved):
        assert found[name] == found["not"]
        weights, loaded, again = found[name]
        assert weights[1] == loaded != again == weights[2] != weights[3]


def test_weights_that_were_swapped_for_a_save_come_back(two_ranks):
    for found in two_ranks.of(moved):
        before, behind, loaded = found["swapped"]
        assert before == behind
        assert not any(loaded)


CELLS = {f"{stage} {name}": (stage, keys) for stage in (0, 1, 2) for name, keys in (("fp32", {}), ("bf16", BF16))}
CELLS |= {"1 summed": (1, SUMMED)}


def _assigned(src, dst):
    for name, parameter in dst.named_parameters():
        parameter.data = src[name].clone().to(parameter.device)


def _assigned_in_fp32(src, dst):
    _assigned({name: values.float() for name, values in src.items()}, dst)


def _left(src, dst):
    """Leave the weights to the optimizer's, which a whole load gives."""


def _swap_memory(one, other):
    one.data, other.data = other.data.view(one.shape), one.data.view(other.shape)


WAYS = {
    "moved before": None,
    "swapped before": None,
    "assigned": _assigned,
    "assigned in fp32": _assigned_in_fp32,
    "by masters": _left,
}


@at_length_on_two_ranks
def loaded_alone(folder):
    """By cell and way: the weights that were saved, those behind a load of weights alone, and behind a step of rate 0.

    Parameters have memory of their own before the load, or get it in the load.
    """
    found = {}
    for cell, (stage, keys) in CELLS.items():
        made = {**config(stage, passes=2), **keys, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        del made["scheduler"]
        engine = build(made)
        kind = next(engine.module.parameters()).dtype
        _window(engine, 0, kind)
        engine.save_checkpoint(f"{folder}/{cell}", tag="one")
        saved = _flat(engine)
        for way, function in WAYS.items():
            _window(engine, 1, kind)
            if way in ("moved before", "by masters"):
                _given_new_memory(engine.module)
            if way == "swapped before":
                _swap_memory(engine.module[0].bias, engine.module[2].weight)
            whole = way == "by masters"
            engine.load_checkpoint(f"{folder}/{cell}", tag="one", load_optimizer_states=whole, custom_load_fn=function)
            engine.module.to(kind)
            loaded = _flat(engine)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            _window(engine, 2, kind)
            found[f"{cell}, {way}"] = [saved, loaded, _flat(engine)]
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.1
        engine.destroy()
    return from_all(found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cell", CELLS)
def test_weights_that_were_loaded_alone_are_stepped_on(two_ranks_at_length, cell, way):
    if cell == "0 fp32" and way == "by masters":
        pytest.skip("torch's own optimizers have no weights of their own, which a load could give")
    for found in two_ranks_at_length.of(loaded_alone):
        saved, loaded, stepped = found[f"{cell}, {way}"]
        assert saved == loaded == stepped
