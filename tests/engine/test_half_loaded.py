"""Which loads leave nothing of one that has ended half way."""

from types import SimpleNamespace

import pytest

from ds_parity.engine.half_loaded import is_whole, refuse_half_loaded
from ds_parity.errors import CheckpointError

WHOLE = {
    "load_module_strict": True,
    "load_optimizer_states": True,
    "load_lr_scheduler_states": True,
    "load_module_only": False,
    "custom_load_fn": None,
}


@pytest.mark.parametrize("load_dir", ["", "folder"])
def test_any_folder_is_one(load_dir):
    with pytest.raises(CheckpointError, match=rf"step: load_checkpoint\('{load_dir}'\) has raised"):
        refuse_half_loaded(load_dir, "step")
    refuse_half_loaded(None, "step")


@pytest.mark.parametrize(
    ("other", "scheduler", "whole"),
    [
        ({}, object(), True),
        ({"load_lr_scheduler_states": False}, None, True),
        ({"load_lr_scheduler_states": False}, object(), False),
        ({"load_module_strict": False}, None, False),
        ({"load_optimizer_states": False}, None, False),
        ({"load_module_only": True}, None, False),
        ({"custom_load_fn": print}, None, False),
    ],
)
def test_a_part_that_is_loaded_over_half_a_checkpoint_is_no_whole_one(other, scheduler, whole):
    assert is_whole(SimpleNamespace(lr_scheduler=scheduler), {**WHOLE, **other}) is whole
