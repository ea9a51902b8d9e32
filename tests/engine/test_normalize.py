"""What a loss is divided by, what makes a pass count for nothing, and how the step's loss is added up."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.engine.internals.normalize import averaged_over, correction_for, divisor, silenced
from ds_parity.errors import ConfigError

# The division.


@pytest.mark.parametrize("n", range(1, 65))
def test_n_equal_micro_batches_on_each_rank_are_divided_by_exactly_n(n):
    """For weights up to 100 and up to 64 ranks."""
    found = {
        divisor(float(n * ranks * weight), weight, ranks, "mean") for weight in range(1, 101) for ranks in range(1, 65)
    }
    assert found == {float(n)}


@given(st.integers(1, 64), st.integers(1, 2**31 - 1), st.integers(1, 4096))
def test_n_equal_micro_batches_are_divided_by_exactly_n_at_any_weight(n, weight, ranks):
    assert divisor(float(n * ranks * weight), weight, ranks, "mean") == n


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 4096), st.floats(-1e3, 1e3))
def test_deepspeeds_mean_over_ranks_leaves_weight_times_loss_over_the_expected_total(expected, weight, ranks, loss):
    mean = loss / divisor(float(expected), weight, ranks, "mean") / ranks
    assert mean == pytest.approx(weight * loss / expected, rel=1e-14, abs=1e-300)


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 4096))
def test_the_weight_of_a_summed_loss_is_in_it_already(expected, weight, ranks):
    assert divisor(float(expected), weight, ranks, "sum") == expected / ranks


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 8), st.booleans())
def test_peers_that_each_give_the_whole_loss_leave_it_once(expected, weight, ranks, peers, all_ranks):
    """Whether DeepSpeed averages over all ranks (ZeRO 3) or over the data-parallel ones: their sum is `peers` times it."""
    averaged = ranks * peers if all_ranks else ranks
    reduced = peers / divisor(float(expected), weight, averaged, "mean", peers) / averaged
    assert reduced == pytest.approx(weight / expected, rel=1e-14)


def test_n_equal_micro_batches_of_sliced_sequences_are_divided_by_exactly_n_on_zero_3():
    for n, weight, ranks, peers in product(range(1, 33), (1, 3, 77), (1, 2, 3, 8), (2, 3, 4, 6)):
        assert divisor(float(n * ranks * weight), weight, ranks * peers, "mean", peers) == n


@pytest.mark.parametrize(
    ("stage", "average", "over"), [(0, True, 3), (1, True, 3), (2, True, 3), (3, True, 6), (2, False, 1)]
)
def test_zero_3_averages_over_all_ranks_and_the_others_over_the_data_parallel_ones(stage, average, over):
    engine = SimpleNamespace(gradient_average=average, zero_optimization_stage=lambda: stage)
    assert averaged_over(engine, ranks=3, peers=2) == over


# Idle passes.


def perceptron():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def hooks(module):
    return [list((parameter._backward_hooks or {}).values()) for parameter in module.parameters()]


@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf, -math.inf])
def test_a_silenced_backward_gives_gradients_that_are_exactly_zero_whatever_the_loss_is(bad):
    module = perceptron()
    loss = (module(torch.ones(2, 3)) * bad).sum()
    with silenced(module):
        loss.backward()
    for parameter in module.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_silenced_backward_leaves_what_is_accumulated_as_it_is(bad):
    module = perceptron()
    module(torch.ones(2, 3)).sum().backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    with silenced(module):
        module(torch.full((2, 3), bad)).sum().backward()
    assert all(torch.equal(p.grad, held) for p, held in zip(module.parameters(), before, strict=True))
    assert all(held.abs().sum() > 0 for held in before)


def test_after_silence_hooks_are_gone_and_gradients_flow_again():
    module = perceptron()
    with silenced(module):
        assert all(len(own) == 1 for own in hooks(module))
    assert not any(hooks(module))
    module(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_hooks_are_gone_after_an_exception_too_and_the_exception_comes_through():
    module = perceptron()
    with pytest.raises(KeyError, match="inside"), silenced(module):
        raise KeyError("inside")
    assert not any(hooks(module))


def test_hooks_of_others_and_frozen_parameters_are_left_alone():
    module = perceptron()
    module[0].weight.requires_grad_(False)
    seen = []
    module[2].weight.register_hook(seen.append)
    with silenced(module):
        module(torch.ones(2, 3)).sum().backward()
    assert module[0].weight.grad is None
    assert [len(own) for own in hooks(module)] == [0, 0, 1, 0]
    assert len(seen) == 1


# The correction.


def test_an_unknown_optimizer_wrapper_is_refused_by_name():
    class Homemade:
        pass

    with pytest.raises(ConfigError, match=r"optimizer wrapper Homemade.*DeepSpeedZeroOptimizer.*only"):
        correction_for(Homemade())


def test_under_a_plain_optimizer_gradients_are_multiplied_by_expected_over_total_before_the_step():
    module = perceptron()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    engine = SimpleNamespace(module=module, optimizer=optimizer, torch_autocast_z0_gradscaler=None)
    module[0].bias.requires_grad_(False)
    module(torch.ones(2, 3)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    with correction_for(optimizer)(engine, 4.0, 5.0):
        for parameter, held in zip(module.parameters(), before, strict=True):
            assert parameter.grad is None if held is None else torch.equal(parameter.grad, held * 0.8)
