"""What DeepSpeed says of other modules on other ranks, in a forward of ZeRO 3, is explained."""

import inspect

import pytest
from deepspeed.runtime.zero import utils

from ds_parity.engine.internals.other_modules import explain
from ds_parity.errors import WindowError

SAID = "Detected a disagreement on list contents between rank0 and rank1: \n list length: 2\n rank0: [0, 1]"


def test_it_is_deepspeeds_text():
    said = inspect.getsource(utils)
    assert said.count("Detected a disagreement on list length") == 1
    assert said.count("Detected a disagreement on list contents") == 1


def test_it_names_the_way_out_and_keeps_the_cause():
    error = RuntimeError(SAID)
    with pytest.raises(WindowError, match=r"rank0: \[0, 1\].*leaf_module.*a new engine") as raised:
        explain(error)
    assert raised.value.__cause__ is error


def test_it_names_outputs_of_other_numbers_too():
    """The same modules, of which one has returned a list with a tensor of each rollout."""
    with pytest.raises(WindowError, match=r"other numbers of tensors.*return one tensor of all rollouts"):
        explain(RuntimeError("Detected a disagreement on list length between rank0 and rank1: \n rank0: 9 \n rank1: 8"))


def test_another_error_is_left_alone():
    explain(RuntimeError("out of memory"))
