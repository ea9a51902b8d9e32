"""Models that DeepSpeed can't train on the ZeRO stage that a configuration asks for."""

import pytest
import torch
from deepspeed.moe.layer import MoE

from ds_parity.engine.foreign_parameters import groups_handed_over, handed_over
from ds_parity.engine.unfit import refuse_optimizer, refuse_unfit
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
    with pytest.raises(ConfigError, match=r"stage = [012], and .*weight is partitioned: the model was built under"):
        refuse_unfit(partitioned, config)


@pytest.mark.parametrize("section", ["auto", {"stage": "auto"}, {"stage": 3}])
def test_no_stage_is_made_up_for_one_that_is_still_to_be_filled_in(partitioned, section):
    refuse_unfit(partitioned, {"zero_optimization": section})


def refuse(groups, stage):
    """What initialize() does with groups that it is given as `model_parameters`."""
    given = {"model_parameters": groups}
    refuse_unfit(torch.nn.Linear(2, 2), on_stage(stage), groups_handed_over(given), handed_over(given))


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


def test_a_group_of_frozen_ones_is_refused_with_fp32_accumulation_too():
    keys = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    groups = groups_handed_over({"model_parameters": [of(True), of(False)]})
    with pytest.raises(ConfigError, match=r"all 1 parameters of group 1 are frozen"):
        refuse_unfit(torch.nn.Linear(1, 1), keys, groups)


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


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_a_sparse_gradient_is_refused_with_zero(kind):
    model = torch.nn.Sequential(kind(4, 2, sparse=True), torch.nn.Linear(2, 2))
    refuse_unfit(model, {"zero_optimization": {"stage": 0}})
    for stage in (1, 2, 3):
        with pytest.raises(ConfigError, match=rf"stage = {stage}, and 0 is a {kind.__name__} with sparse=True"):
            refuse_unfit(model, {"zero_optimization": {"stage": stage}})
        refuse_unfit(model, {"zero_optimization": {"stage": stage}}, chosen=model[1].parameters())
    model[0].weight.requires_grad_(False)
    refuse_unfit(model, {"zero_optimization": {"stage": 3}})


def test_a_sparse_gradient_that_a_dense_head_makes_dense_is_taken():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    refuse_unfit(model, {"zero_optimization": {"stage": 2}})


def with_dtypes(*dtypes, trained=True):
    """Layers of these dtypes; the last one may be frozen."""
    layers = [torch.nn.Linear(2, 2).to(dtype) for dtype in dtypes]
    layers[-1].requires_grad_(trained)
    return torch.nn.Sequential(*layers)


def on_stage(stage, **keys):
    """A configuration."""
    return {"zero_optimization": {"stage": stage, **keys}}


MIXED = (torch.float32, torch.bfloat16)
OFFLOADED = {"offload_param": {"device": "cpu"}}


def test_dtypes_that_do_not_share_a_buffer_are_refused_on_stage_3():
    with pytest.raises(ConfigError, match=r"2 dtypes \(0.weight is float32, 1.weight is bfloat16\)"):
        refuse_unfit(with_dtypes(*MIXED), on_stage(3))
    with pytest.raises(ConfigError, match="2 dtypes"):
        refuse_unfit(with_dtypes(*MIXED), on_stage(3, **OFFLOADED))


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        (on_stage(2), True),
        (on_stage(3), False),
        ({**on_stage(3), "bf16": {"enabled": True}}, True),
        ({**on_stage(3), "fp16": {"enabled": "auto"}}, True),
    ],
    ids=["stage 2", "frozen", "bf16", "auto"],
)
def test_other_dtypes_are_taken(config, trained):
    refuse_unfit(with_dtypes(*MIXED, trained=trained), config)


@pytest.mark.parametrize("stage", [1, 2])
def test_fp64_beside_others_is_refused_in_one_group_alone(stage):
    model = with_dtypes(torch.float64, torch.float32)
    with pytest.raises(ConfigError, match=r"2 dtypes \(0.weight is float64, 1.weight is float32\)"):
        refuse_unfit(model, on_stage(stage))
    apart = [list(one.parameters()) for one in model]
    refuse_unfit(model, on_stage(stage), apart, list(model.parameters()))


def test_another_stage_is_only_named_where_it_takes_the_model():
    with pytest.raises(ConfigError, match=r"or use stage 1 or 2$"):
        refuse_unfit(with_dtypes(torch.float64), on_stage(0))
    with pytest.raises(ConfigError, match=r'set "bf16" or "fp16"$'):
        refuse_unfit(with_dtypes(torch.float64, torch.float32), on_stage(0))


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_a_dtype_that_nobody_trains_is_none_of_the_buffers(by_optimizer):
    model = with_dtypes(*MIXED)
    chosen = list(model[0].parameters())
    given = {"optimizer": torch.optim.SGD(chosen)} if by_optimizer else {"model_parameters": chosen}
    refuse_unfit(model, on_stage(3), (), handed_over(given))
    with pytest.raises(ConfigError, match="2 dtypes"):
        refuse_unfit(model, on_stage(3), (), model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_complex_parameter_is_refused(stage):
    with pytest.raises(ConfigError, match=r"0.weight is complex: .* keep the real and the imaginary part"):
        refuse_unfit(with_dtypes(torch.complex64), on_stage(stage))
    refuse_unfit(with_dtypes(torch.float32, torch.complex64, trained=False), on_stage(stage))


def test_gradients_in_fp64_are_refused_on_stage_0_alone():
    model = with_dtypes(torch.float64)
    with pytest.raises(ConfigError, match=r"stage = 0, and 0.weight is float64: DeepSpeed reduces no gradient of that"):
        refuse_unfit(model, on_stage(0))
    refuse_unfit(model, on_stage(1))


def test_a_parameter_without_elements_is_refused_on_stage_3_alone():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 0, bias=False))
    with pytest.raises(ConfigError, match=r"stage = 3, and 1.weight has no elements"):
        refuse_unfit(model, on_stage(3))
    refuse_unfit(model, on_stage(2))


def test_a_partition_is_measured_by_the_whole_parameter(partitioned):
    partitioned.weight.ds_numel, partitioned.weight.data = 4, torch.zeros(0)
    refuse_unfit(partitioned, on_stage(3))


@pytest.mark.parametrize("by_name", [True, False])
def test_an_optimizer_that_needs_a_closure_is_refused(by_name):
    given = None if by_name else torch.optim.LBFGS(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"the optimizer is LBFGS, whose step\(\) evaluates the loss again"):
        refuse_optimizer(given, {"optimizer": {"type": "LBFGS"}} if by_name else {})


def test_a_torch_without_muon_has_every_other_optimizer(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    refuse_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), on_stage(2))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_an_optimizer_of_matrices_is_refused_where_it_would_get_vectors():
    muon = torch.optim.Muon(torch.nn.Linear(2, 2, bias=False).parameters())
    for stage in (1, 2, 3):
        with pytest.raises(ConfigError, match=rf"stage = {stage}, and the optimizer is torch's Muon"):
            refuse_optimizer(muon, {"zero_optimization": {"stage": stage}})
    refuse_optimizer(muon, {"zero_optimization": {"stage": 0}})
    refuse_optimizer(None, {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    "given",
    [None, torch.optim.AdamW, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])],
    ids=["DeepSpeed's own", "a function", "SGD"],
)
def test_other_optimizers_are_taken(given):
    refuse_optimizer(given, {"optimizer": {"type": "OneBitAdam"}})


def experts(*, trained, ep_size=1):
    """A layer before another one."""
    layer = MoE(2, torch.nn.Linear(2, 2), num_experts=2, ep_size=ep_size)
    layer.deepspeed_moe.experts.requires_grad_(trained)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), layer)


def with_experts(stage, *, trained=True, chosen=(), ep_size=1, **section):
    model = experts(trained=trained, ep_size=ep_size)
    wanted = [one for name, one in model.named_parameters() if name.startswith(tuple(chosen))]
    refuse_unfit(model, {"zero_optimization": {"stage": stage, **section}}, chosen=wanted if chosen else ())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("given", [{"trained": False}, {"chosen": "0"}])
def test_experts_of_which_none_is_trained_are_refused_where_deepspeed_asserts_that_they_are(stage, given):
    with pytest.raises(ConfigError, match=rf"stage = {stage}, and 1 is .* MoE layer: none of its experts is trained"):
        with_experts(stage, **given)


@pytest.mark.parametrize(
    ("stage", "key"), [(1, "reduce_scatter"), (2, "reduce_scatter"), (2, "contiguous_gradients")], ids=str
)
def test_experts_whose_gradients_are_reduced_another_way_are_refused(stage, key):
    with pytest.raises(ConfigError, match=rf"stage = {stage}, and 1 is .*: zero_optimization\.{key} is off, and"):
        with_experts(stage, **{key: False})


@pytest.mark.parametrize(
    "given",
    [
        {"stage": 0, "trained": False, "reduce_scatter": False},
        {"stage": 1, "contiguous_gradients": False},
        {"stage": 2, "chosen": "1"},
        {"stage": 2, "reduce_scatter": True},
    ],
    ids=str,
)
def test_other_experts_are_taken(given):
    with_experts(**given)


def test_experts_on_different_ranks_whose_gradients_all_ranks_would_add_up_are_refused():
    with pytest.raises(ConfigError, match=r"stage = 1, and 1 is .*: zero_optimization\.contiguous_gradients is off"):
        with_experts(1, ep_size=2, contiguous_gradients=False)
    with_experts(1, ep_size=2)
    for stage in (1, 2):
        offloaded = {"contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}
        with_experts(stage, ep_size=2, **offloaded)
