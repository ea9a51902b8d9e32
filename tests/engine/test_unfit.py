"""Models that DeepSpeed can't train on the ZeRO stage that a configuration asks for."""

import pytest
import torch

from ds_parity.engine.unfit import refuse_unfit
from ds_parity.errors import ConfigError


@pytest.fixture
def partitioned():
    """A model as deepspeed.zero.Init leaves it: its parameters have a name of DeepSpeed's."""
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0
    return model


@pytest.mark.parametrize("section", [None, {}, {"stage": 2}, True])
def test_a_partitioned_model_is_refused_below_stage_3(partitioned, section):
    config = {} if section is None else {"zero_optimization": section}
    with pytest.raises(ConfigError, match=r"zero_optimization.stage = [012], and the model was built under"):
        refuse_unfit(partitioned, config)


@pytest.mark.parametrize("section", ["auto", {"stage": "auto"}, {"stage": 3}])
def test_no_stage_is_made_up_for_one_that_is_still_to_be_filled_in(partitioned, section):
    refuse_unfit(partitioned, {"zero_optimization": section})
