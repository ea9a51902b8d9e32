"""An optimizer's `step` that is a number becomes what torch's own optimizers keep, and no other's."""

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from ds_parity.engine.internals import base
from tests.defaults import default_dtype

META = torch.device("meta")


class Own(torch.optim.AdamW):
    """What a user derives."""


class Whole(torch.optim.Optimizer):
    """An optimizer that has nothing of torch's but the base, as those of apex, bitsandbytes and DeepSpeed."""


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adagrad, True),
        (Own, True),
        (torch.optim.SparseAdam, False),
        (Whole, False),
        (DeepSpeedCPUAdam, False),
    ],
)
def test_torchs_own_and_what_is_derived_of_them_keep_a_tensor(kind, keeps):
    assert base._keeps_tensors(object.__new__(kind)) is keeps


@pytest.mark.parametrize(("group", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")])
def test_it_lies_where_torch_keeps_it(group, device):
    step = base._step_of_torch(300, META, [{"fused": None}, group])
    assert (step.device.type, step.dtype, step.shape) == (device, torch.float32, ())


@pytest.mark.parametrize(
    ("default", "fused", "dtype"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float64, True, torch.float32),
    ],
)
def test_its_type_is_torchs_and_not_the_default(default, fused, dtype):
    with default_dtype(default):
        step = base._step_of_torch(300, torch.device("cpu"), [{"fused": fused}])
    assert (step.dtype, float(step + 1)) == (dtype, 301.0)
