"""What DeepSpeed says of other modules on other ranks, in a forward of ZeRO 3, is explained."""

import inspect

import pytest
from deepspeed.runtime.zero import partitioned_param_coordinator, utils

from ds_parity.engine.internals.fetched_ahead import explain_fetched
from ds_parity.engine.internals.other_modules import explain
from ds_parity.errors import WindowError

SAID = "Detected a disagreement on list contents between rank0 and rank1: \n list length: 2\n rank0: [0, 1]"
FETCHED = "{'id': 0, 'status': 'INFLIGHT', 'numel': 64}"


def raised(kind, said, by="deepspeed.runtime.zero.utils"):
    """An error as a function of a module raises it."""
    module = {"__name__": by, "error": kind(said)}
    exec("def fail():\n    raise error", module)
    try:
        module["fail"]()
    except Exception as error:
        return error


def test_it_is_deepspeeds_text():
    said = inspect.getsource(utils)
    assert said.count("Detected a disagreement on list length") == 1
    assert said.count("Detected a disagreement on list contents") == 1
    assert "== ZeroParamStatus.AVAILABLE, param.ds_summary()" in inspect.getsource(partitioned_param_coordinator)


def test_it_names_the_way_out_and_keeps_the_cause():
    error = raised(RuntimeError, SAID)
    with pytest.raises(WindowError, match=r"rank0: \[0, 1\].*leaf_module.*a new engine") as told:
        explain(error)
    assert told.value.__cause__ is error


def test_it_names_outputs_of_other_numbers_too():
    """The same modules, of which one has returned a list with a tensor of each rollout."""
    said = "Detected a disagreement on list length between rank0 and rank1: \n rank0: 9 \n rank1: 8"
    with pytest.raises(WindowError, match=r"other numbers of tensors.*return one tensor of all rollouts"):
        explain(raised(RuntimeError, said))


def test_a_weight_that_another_engine_fetches_is_named_with_the_way_out():
    error = raised(AssertionError, FETCHED)
    with pytest.raises(WindowError, match=r"'INFLIGHT'.*stage3_prefetch_bucket_size to 0") as told:
        explain_fetched(error)
    assert told.value.__cause__ is error


class _UnspokenError(AssertionError):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("explains", [explain, explain_fetched])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        raised(RuntimeError, "out of memory"),
        raised(AssertionError, SAID, "the.model"),
        raised(AssertionError, FETCHED, "the.model"),
        raised(_UnspokenError, "", "the.model"),
    ],
    ids=["torch", "DeepSpeed", "disagreement", "fetched", "unspoken"],
)
def test_another_error_is_left_alone_and_so_is_one_of_the_model_that_reads_alike(explains, error):
    explains(error)
