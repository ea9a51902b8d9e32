"""What an adapter does with the gradients that an optimizer wrapper accumulates; on ranks: tests/distributed."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.engine.internals import zero3
from ds_parity.engine.internals.adapter import choose
from ds_parity.engine.internals.plain import Plain
from ds_parity.engine.internals.zero import checksum
from ds_parity.engine.internals.zero3 import Zero3
from ds_parity.engine.internals.zero12 import Zero12
from ds_parity.errors import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("kind", "average", "over"),
    [(Plain, True, 3), (Zero12, True, 3), (Zero3, True, 6), (Zero12, False, 1), (Zero3, False, 1)],
)
def test_zero_3_averages_over_all_ranks_and_the_others_over_the_data_parallel_ones(kind, average, over):
    adapter = kind(SimpleNamespace(gradient_average=average))
    assert adapter.averaged_over(ranks=3, peers=2) == over


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def test_an_unknown_optimizer_wrapper_is_refused_by_name():
    class Homemade:
        pass

    with pytest.raises(ConfigError, match=r"optimizer wrapper Homemade.*DeepSpeedZeroOptimizer.*only"):
        choose(SimpleNamespace(optimizer=Homemade()))


def test_under_a_plain_optimizer_gradients_are_multiplied_by_expected_over_total_before_the_step():
    module = perceptron()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = SimpleNamespace(module=module, optimizer=optimizer, torch_autocast_z0_gradscaler=None)
    module[0].bias.requires_grad_(False)
    module(torch.ones(2, 3)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    with choose(engine).corrected(4.0, 5.0):
        for parameter, kept in zip(module.parameters(), before, strict=True):
            assert parameter.grad is None if kept is None else torch.equal(parameter.grad, kept * 0.8)


class Partitioned(torch.nn.Parameter):
    """A parameter as zero.Init leaves it, of as many elements as a rank holds."""

    ds_id, ds_numel = 0, 4

    def partition_numel(self):
        return 4


def test_partitions_on_the_host_are_moved_to_the_accelerator_before_their_norm_is_taken(monkeypatch):
    """No accelerator is here, so that another device stands for it."""
    accelerator = SimpleNamespace(
        on_accelerator=lambda tensor: tensor.device.type == "meta", current_device_name=lambda: "meta"
    )
    monkeypatch.setattr(zero3, "get_accelerator", lambda: accelerator)
    first, second = (Partitioned(torch.ones(4)) for _ in range(2))
    second.ds_id = 1
    handed = []
    optimizer = SimpleNamespace(
        offload_optimizer=True,
        fp16_groups=[[first, second]],
        norm_for_param_grads={1: torch.zeros((), device="meta")},
        get_param_id=lambda parameter: parameter.ds_id,
        _get_param_partition_rank=lambda parameter: 0,
        _offload_grad_partition_at_boundary=lambda parameter, buffer, *_: handed.append((parameter.ds_id, buffer)),
        _swap_out_offload_fp32_gradients=lambda *_: None,
        _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition={0: torch.ones(4), 1: torch.ones(4)},
    )
    Zero3(SimpleNamespace(optimizer=optimizer)).complete()
    ((number, buffer),) = handed
    assert (number, buffer.device.type) == (0, "meta")


@pytest.mark.parametrize("apart", [1, 8, 24, 32, 60, 61, 64, 122])
def test_another_parameter_gives_another_checksum_however_far_it_is(apart):
    assert checksum(1 << 5) != checksum(1 << (5 + apart))


def test_many_parameters_are_not_none():
    assert checksum((1 << 61) - 1) != checksum(0)


@given(st.lists(st.integers(0, 2**300), min_size=2, max_size=4, unique=True))
def test_other_sets_of_parameters_in_another_order_give_another_checksum(sets):
    def of(sets):
        total = 0
        for used in sets:
            total = checksum(used, total)
        return total

    assert of(sets) != of(sets[::-1])


def test_copies_of_hpz_are_forgotten_and_quantized_ones_are_refused():
    """DeepSpeed quantizes frozen weights once, so that a load would leave the old ones in use."""
    plain, quantized = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    plain.ds_secondary_tensor, quantized.ds_secondary_tensor = torch.zeros(1), torch.zeros(1)
    adapter = object.__new__(Zero3)
    adapter.engine = SimpleNamespace(module=torch.nn.ParameterList([plain]))
    adapter.refuse_loading_over_copies()
    adapter.forget_copies()
    assert plain.ds_secondary_tensor is None
    quantized.ds_secondary_tensor.ds_quant_scale = torch.ones(1)
    adapter.engine.module = torch.nn.ParameterList([plain, quantized])
    with pytest.raises(CheckpointError, match="zero_quantized_nontrainable_weights"):
        adapter.refuse_loading_over_copies()
