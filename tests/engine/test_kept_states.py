"""Parameters that are dealt in turns: asked of the ranks that DeepSpeed deals them to, which are not all ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine import kept_states, pipeline_checkpoints
from ds_parity.engine.internals.rates_behind_loads import Standing
from ds_parity.errors import CheckpointError

WORLD = 2


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Groups are given by their size; there are two ranks."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: WORLD if group is None else group)


def engine_of(ranks, in_turns=True, saved_on=None, universal=True):
    model = torch.nn.Linear(2, 1)
    wrapper = SimpleNamespace(round_robin_gradients=in_turns, dp_process_group=ranks)
    return SimpleNamespace(
        module=model, optimizer=wrapper, basic_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        fp16_enabled=lambda: False, load_universal_checkpoint=lambda: universal, zero_optimization_stage=lambda: 1,
        loaded_checkpoint_dp_world_size=saved_on, dp_world_size=ranks,
    )  # fmt: skip


def refused(engine, state):
    with pytest.raises(CheckpointError) if state.pop("refused") else nullcontext():
        kept_states.refuse_universal_in_turns(engine, "folder", state)


@pytest.mark.parametrize(("ranks", "in_turns", "dealt"), [(1, True, False), (2, True, True), (2, False, False)])
def test_a_stage_of_one_column_deals_nothing_in_turns(ranks, in_turns, dealt):
    engine = engine_of(ranks, in_turns)
    assert kept_states.kept(engine, [])["round_robin_gradients"] is dealt
    refused(engine, {"refused": dealt})


@pytest.mark.parametrize(("saved_on", "is_refused"), [(1, False), (2, True), (None, True)])
def test_what_one_rank_saved_with_true_is_converted_right(saved_on, is_refused):
    refused(engine_of(2, False, saved_on), {"round_robin_gradients": True, "refused": is_refused})


@pytest.mark.parametrize(("ranks", "is_refused"), [(1, False), (2, True)])
def test_one_column_has_the_states_of_all_parameters_with_either_setting(ranks, is_refused):
    engine = engine_of(ranks, universal=False)
    with pytest.raises(CheckpointError) if is_refused else nullcontext():
        kept_states.refuse_states_of_others(engine, {"round_robin_gradients": False}, [], named=True, fp16=None)


def test_a_pipeline_that_finds_no_checkpoint_says_nothing_of_turns(monkeypatch):
    engine = engine_of(2)
    engine.load_checkpoint = lambda *_, **__: (None, None)
    for name in ("as_it_was_saved", "own_clipping"):
        monkeypatch.setattr(pipeline_checkpoints, name, lambda _: nullcontext())
    # What is remembered of a load refers to the optimizer.
    engine.optimizer, engine.lr_scheduler = torch.optim.SGD([torch.zeros(1)], lr=0.1), None
    options = {"load_optimizer_states": True, "load_module_only": False, "load_module_strict": True}
    assert pipeline_checkpoints._loaded(engine, "folder", "tag", options, Standing(None)) == (None, None, None)


@pytest.mark.parametrize(
    ("saved", "own", "said"),
    [
        (["a", "b", "c", "d", "e"], ["a", "b", "c", "e", "d"], "..., d, e (5 parameters), and is ..., e, d (5"),
        (["a", "b", "c", "d"], ["x", "b", "c", "d"], "was a, b, c, ... (4 parameters), and is x, b, c, ... (4"),
        (["a", "b"], ["a", "b", "c"], "was ... (2 parameters), and is ..., c (3 parameters)"),
        (["a"], [], "was a (1 parameter), and is empty (0 parameters)"),
    ],
)
def test_groups_that_differ_are_shown_from_where_they_do(saved, own, said):
    with pytest.raises(CheckpointError) as error:
        kept_states._refuse_other_places([saved], [own])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "fp16"),
    [
        ({"fp16": {"enabled": True}}, True),
        ({"fp16": {"enabled": 1, "loss_scale": 0}}, True),
        ({"fp16": {"enabled": "true"}}, True),
        ({"fp16": {"enabled": False}}, False),
        ({"fp16": {}}, False),
        ({}, False),
        ({"fp16": {"enabled": "auto"}}, None),
        (None, None),
    ],
)
def test_bare_deepspeeds_configuration_tells_whether_a_run_was_in_fp16(config, fp16):
    """As DeepSpeed takes it."""
    assert kept_states.saved_in_fp16({}, {"ds_config": config}) is fp16
    assert kept_states.saved_in_fp16({"states_of": {"fp16": True}}, {"ds_config": config}) is True


def test_classes_are_related_whose_states_are_the_same():
    assert kept_states._related(["FusedAdam"], ["DeepSpeedCPUAdam"])
    assert kept_states._related(["Halved", "Adagrad"], ["Adagrad"])
    assert not kept_states._related(["Adagrad"], ["DeepSpeedCPUAdagrad"]), "torch keeps sum, DeepSpeed exp_avg_sq"
