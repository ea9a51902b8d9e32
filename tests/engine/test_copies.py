"""An engine can't be copied; a checkpoint's client state has room for ds_parity's own part, and for that alone."""

import copy
import pickle
from types import SimpleNamespace

import pytest
from torch.nn import Module

from ds_parity.engine import checkpoint
from ds_parity.engine.engine import ParityEngine
from ds_parity.engine.framework import FrameworkEngine
from ds_parity.engine.saving import Saving
from ds_parity.errors import CheckpointError, WindowError
from ds_parity.window import Ledger, Rules


@pytest.mark.parametrize("kind", [ParityEngine, FrameworkEngine])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_an_engine_is_refused_with_the_way_out(kind, how):
    engine = kind.__new__(kind)
    with pytest.raises(WindowError, match=r"save_checkpoint\(\).*engine\.module"):
        how(engine)


def driver():
    return SimpleNamespace(
        ledger=Ledger(Rules(8, 1)),
        passes_pending=lambda: 0,
        state=SimpleNamespace(half_loaded=None),
        say_to_save=lambda value: [value],
        refuse_saving=lambda error: None,
        settings=SimpleNamespace(count="rollout", lr_progress="optimizer_step"),
        boundary=SimpleNamespace(scheduler=lambda: None, follow_a_loop=lambda **_: None),
        adapter=SimpleNamespace(groups=list, groups_of_optimizer=list, grad_scaler=lambda: None),
        engine=SimpleNamespace(
            zero_nvme_offload_optimizer=lambda: False,
            optimizer=SimpleNamespace(param_groups=[{"params": [], "lr": 0.1}]),
            basic_optimizer=None,
            lr_scheduler=None,
            module=Module(),
            fp16_enabled=lambda: False,
            global_steps=5,
        ),
    )


def saved_with(client_state):
    """What is saved of a client state, by one rank."""
    return checkpoint.with_window(driver(), client_state, Saving("nowhere", "tag", True, False, "one"))


@pytest.mark.parametrize("own", [7, None, {}, {"target": 8}, "mine"])
def test_a_client_state_of_the_callers_own_under_our_name_is_refused(own):
    with pytest.raises(CheckpointError, match=r"client_state\['ds_parity'\] is .*: .*another name"):
        saved_with({"ds_parity": own, "epoch": 3})


def test_a_client_state_that_was_loaded_is_taken_and_brought_up_to_date():
    loaded = saved_with({"epoch": 3})
    stale = {**loaded, "ds_parity": {**loaded["ds_parity"], "windows": 17}}
    assert saved_with(stale) == loaded


OF_DEEPSPEED = {"ds_config": {}, "ds_version": "0.19.8", "checkpoint_parallel_dimensions": {}, "optimizer": {"old": 1}}


def test_what_deepspeed_had_in_a_client_state_that_was_loaded_is_left_out():
    """DeepSpeed writes the client state over its own values, so that the optimizer's states would be old ones."""
    loaded = saved_with({"epoch": 3})
    assert saved_with({**loaded, **OF_DEEPSPEED}) == loaded


def test_a_load_of_the_model_alone_returns_its_counts_too():
    loaded, ranks = saved_with({"epoch": 3}), {"dp_world_size": 2, "mp_world_size": 1}
    assert saved_with({**loaded, **OF_DEEPSPEED, **ranks, "global_steps": 1, "random_ltd": None}) == loaded


@pytest.mark.parametrize("name", ["module", "global_steps", "skipped_steps", "data_sampler"])
def test_a_value_of_the_callers_own_is_refused_in_a_client_state_that_was_loaded_too(name):
    with pytest.raises(CheckpointError, match=rf"client_state\['{name}'\] is of int: DeepSpeed saves its own"):
        saved_with({**saved_with({"epoch": 3}), **OF_DEEPSPEED, name: 4})


@pytest.mark.parametrize("name", ["optimizer", "module", "global_steps", "lr_scheduler", "ds_config"])
def test_a_value_of_the_callers_own_under_a_name_of_deepspeeds_is_refused(name):
    with pytest.raises(CheckpointError, match=rf"client_state\['{name}'\] is of int: DeepSpeed saves its own"):
        saved_with({name: 4})


def test_a_count_that_is_the_engines_own_may_be_saved_beside_it():
    assert saved_with({"global_steps": 5})["global_steps"] == 5
