"""Models that DeepSpeed can't train on the ZeRO stage that a configuration asks for."""

import pytest
import torch

from ds_parity.engine.foreign_parameters import groups_handed_over
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


def refuse(groups, stage):
    """What initialize() does with groups that it is given as `model_parameters`."""
    handed_over = groups_handed_over({"model_parameters": groups})
    refuse_unfit(torch.nn.Linear(2, 2), {"zero_optimization": {"stage": stage}}, handed_over)


def of(*trained):
    """A group of parameters, each of which is trained or frozen."""
    return {"params": [torch.nn.Parameter(torch.zeros(1), requires_grad=one) for one in trained]}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_of_frozen_parameters_is_refused_where_deepspeed_ends_in_an_index_error(stage):
    groups = [of(True), of(False, False)]
    with pytest.raises(ConfigError, match=rf"stage = {stage}, and all 2 parameters of group 1 are frozen .* leave the"):
        refuse(groups, stage)


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        (0, [of(False)]),
        (3, [of(False)]),
        (2, [of(True, False), of()]),
        (2, [torch.nn.Parameter(torch.zeros(1), requires_grad=False)]),
    ],
    ids=["stage 0", "stage 3", "some are trained", "parameters without groups"],
)
def test_other_groups_are_taken(stage, groups):
    refuse(groups, stage)


def test_a_group_with_named_parameters_is_looked_at():
    (frozen,) = of(False)["params"]
    with pytest.raises(ConfigError, match=r"all 1 parameters of group 0 are frozen"):
        refuse([{"params": [("weight", frozen)]}], 1)


def test_a_generator_inside_a_group_is_left_for_deepspeed_to_read():
    once = (one for one in of(False, True)["params"])
    refuse([{"params": once}], 1)
    assert len(list(once)) == 2


def test_the_groups_of_an_optimizer_come_before_those_of_the_model():
    optimizer = torch.optim.SGD([of(False)["params"][0]], lr=0.1)
    assert [len(one) for one in groups_handed_over({"optimizer": optimizer, "model_parameters": [of(True, True)]})] == [
        1
    ]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_parameter_without_a_shape_is_refused(stage):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"1.weight has no shape yet .* run the model once"):
        refuse_unfit(model, {"zero_optimization": {"stage": stage}})
    model(torch.zeros(1, 2))
    refuse_unfit(model, {"zero_optimization": {"stage": stage}})
