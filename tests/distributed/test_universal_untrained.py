"""Frozen weights and buffers in universal checkpoints, which DeepSpeed loads without them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import ds_parity
from tests.distributed.cells import config
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STAGES = (1, 2, 3)
LOST = ("layer.weight/fp32.pt", "layer.bias/exp_avg.pt", "layer.bias")


class _Model(torch.nn.Module):
    """A layer, frozen weights (of a number that the ranks do not divide, and a single one) and buffers."""

    def __init__(self, value, *, more=False, shape=(3,)):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.frozen = torch.nn.Parameter(torch.full(shape, value), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(value), requires_grad=False)
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("scratch", torch.full((3,), value), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        # A frozen weight with two names, and what a module keeps of its own, of any shape.
        self.first, self.second = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
        self.first.weight = self.second.weight = torch.nn.Parameter(torch.full((2, 2), value), requires_grad=False)
        self.kept = torch.full((int(value),), value)
        if more:
            self.register_buffer("more", torch.full((3,), value))

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state

    def forward(self, x):
        self.batches += 1
        return ((self.layer(x) * self.scale + self.mean).float() ** 2).mean() + self.frozen.sum() * 0


def _engine(stage, precision, model):
    keys = {**config(stage, precision, 2, "AdamW"), "checkpoint": {"load_universal": True}}
    trained = [p for p in model.parameters() if p.requires_grad]
    return ds_parity.initialize(model=model, model_parameters=trained, config=keys)[0]


def _held(engine):
    module = engine.module
    with GatheredParameters([p for p in module.parameters() if hasattr(p, "ds_id")]):
        return {
            name: value.detach().float().tolist()
            for name, value in [*module.named_parameters(), *module.named_buffers()]
        }


def _saved(stage, precision, path):
    """An engine behind three steps, whose checkpoint is converted."""
    engine = _engine(stage, precision, _Model(5.0))
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(x.to(engine.device, torch.bfloat16 if precision == "bf16" else x.dtype)), rollouts=1)
        engine.step()
    engine.save_checkpoint(path)
    said = converted(path, 3)
    assert said in (None, "nothing was raised"), said
    return engine


def _ended(stage, precision, path, **options):
    engine = _engine(stage, precision, _Model(1.0, **options))
    said = from_all(refusal(lambda: engine.load_checkpoint(path)))
    dist.barrier()
    return said


def _loaded(stage, precision, path, *, more, strict):
    engine = _engine(stage, precision, _Model(1.0, more=more))
    engine.load_checkpoint(path, load_module_strict=strict)
    return _held(engine)


def _ended_without(lost, stage, precision, path):
    """What a load says of a checkpoint without a file or folder, and whether the engine is as it was."""
    dist.barrier()
    engine = _engine(stage, precision, _Model(1.0))
    before = _held(engine)
    there, aside = Path(path, "universal", "zero", lost), Path(path, "aside")
    if dist.get_rank() == 0:
        there.rename(aside)
    dist.barrier()
    said = from_all(refusal(lambda: engine.load_checkpoint(path)))
    if dist.get_rank() == 0:
        aside.rename(there)
    return said, _held(engine) == before


@at_length_on_two_ranks
def universal_untrained(folder):
    """By stage and precision: what was saved, what a load gives another engine, and what other models end in."""
    results = {}
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            of = (stage, precision, f"{folder}/untrained-{stage}-{precision}")
            results[f"{stage}-{precision}"] = {
                "saved": _held(_saved(*of)),
                "loaded": _loaded(*of, more=False, strict=True),
                "ended": {"more": _ended(*of, more=True), "shape": _ended(*of, shape=(4,))},
                "lenient": _loaded(*of, more=True, strict=False),
            }
            results[f"{stage}-{precision}"]["lost"] = [_ended_without(lost, *of) for lost in LOST]
    return from_all(results)


@pytest.fixture(params=["fp32", "bf16"])
def precision(request):
    return request.param


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_and_buffers_are_those_that_were_saved(two_ranks_at_length, stage, precision):
    for results in two_ranks_at_length.of(universal_untrained):
        saved, loaded = (dict(results[f"{stage}-{precision}"][name]) for name in ("saved", "loaded"))
        # What is not saved is the engine's own.
        assert (saved.pop("scratch"), loaded.pop("scratch")) == ([5.0] * 3, [1.0] * 3)
        assert loaded == saved
        assert loaded["batches"] == 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_with_more_or_other_ones_is_refused_on_every_rank(two_ranks_at_length, stage, precision):
    for results in two_ranks_at_length.of(universal_untrained):
        ended = results[f"{stage}-{precision}"]["ended"]
        assert all(said.startswith("CheckpointError: the universal checkpoint has no more") for said in ended["more"])
        # A module may take other shapes by itself, so that torch is asked where nothing is partitioned.
        says = "frozen has the shape (3,), and this model's has (4,)" if stage == 3 else "size mismatch for frozen"
        assert all(said.startswith("CheckpointError") and says in said for said in ended["shape"])


@pytest.mark.parametrize("stage", STAGES)
def test_without_strictness_what_is_not_there_stays(two_ranks_at_length, stage, precision):
    for results in two_ranks_at_length.of(universal_untrained):
        lenient = results[f"{stage}-{precision}"]["lenient"]
        assert lenient["more"] == [1.0] * 3
        assert lenient["mean"] == lenient["frozen"] == [5.0] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_file_is_told_on_every_rank_before_anything_is_loaded(two_ranks_at_length, stage, precision):
    for results in two_ranks_at_length.of(universal_untrained):
        for lost, (said, untouched) in zip(LOST, results[f"{stage}-{precision}"]["lost"], strict=True):
            assert all(one.startswith("CheckpointError") and f"has no zero/{lost}" in one for one in said), said
            assert untouched


# What DeepSpeed converts of an optimizer's state, and what it does not.
OPTIMIZERS = {
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), STAGES, "no max_exp_avg_sq of its optimizer"),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.1), (3,), "no mu_product of its optimizer (NAdam)"),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.1), STAGES, "nothing was raised"),
}
CASES = [(name, stage) for name, (_, stages, _) in OPTIMIZERS.items() for stage in stages]


def _by(name, stage, *, universal):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    keys = {k: v for k, v in config(stage, "fp32", 2).items() if k not in ("optimizer", "scheduler")}
    optimizer = OPTIMIZERS[name][0](model.parameters())
    keys["checkpoint"] = {"load_universal": universal}
    return ds_parity.initialize(model=model, optimizer=optimizer, config=keys)[0]


@at_length_on_two_ranks
def universal_states(folder):
    """By optimizer and stage: what a load of a converted checkpoint ends in."""
    results = {}
    for name, stage in CASES:
        path, engine = f"{folder}/{name}-{stage}", _by(name, stage, universal=False)
        engine.backward(engine(torch.ones(2, 4, device=engine.device)).pow(2).mean(), rollouts=1)
        engine.step()
        engine.save_checkpoint(path)
        said = converted(path, 1)
        assert said in (None, "nothing was raised"), said
        results[f"{name} {stage}"] = from_all(
            refusal(lambda n=name, s=stage, p=path: _by(n, s, universal=True).load_checkpoint(p))
        )
    return results


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_states_that_no_conversion_keeps_are_told_and_not_begun_anew(two_ranks_at_length, name, stage):
    for said in two_ranks_at_length.of(universal_states)[f"{name} {stage}"]:
        assert OPTIMIZERS[name][2] in said
