"""An engine can't be copied; a checkpoint's client state has room for ds_parity's own part, and for that alone."""

import copy
import pickle
from types import SimpleNamespace

import pytest
from torch.nn import Module

from ds_parity.engine import checkpoint
from ds_parity.engine.engine import ParityEngine
from ds_parity.engine.framework import FrameworkEngine
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
        meet_to_save=lambda: None,
        refuse_saving=lambda error: None,
        settings=SimpleNamespace(count="rollout", lr_progress="optimizer_step"),
        adapter=SimpleNamespace(groups=list),
        engine=SimpleNamespace(
            optimizer=SimpleNamespace(param_groups=[{"params": [], "lr": 0.1}]),
            basic_optimizer=None,
            module=Module(),
            fp16_enabled=lambda: False,
        ),
    )


@pytest.mark.parametrize("own", [7, None, {}, {"target": 8}, "mine"])
def test_a_client_state_of_the_callers_own_under_our_name_is_refused(own):
    with pytest.raises(CheckpointError, match=r"client_state\['ds_parity'\] is .*: .*another name"):
        checkpoint.with_window(driver(), {"ds_parity": own, "epoch": 3})


def test_a_client_state_that_was_loaded_is_taken_and_brought_up_to_date():
    loaded = checkpoint.with_window(driver(), {"epoch": 3})
    stale = {**loaded, "ds_parity": {**loaded["ds_parity"], "windows": 17}}
    assert checkpoint.with_window(driver(), stale) == loaded
