"""What makes a pass count for nothing, and how a loss goes into DeepSpeed's backward."""

import math
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.division import Division, silenced
from ds_parity.engine.internals.plain import Plain
from ds_parity.engine.record.metrics import Meter
from ds_parity.window import Counts, Weighting, Window


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
    assert all(torch.equal(p.grad, kept) for p, kept in zip(module.parameters(), before, strict=True))
    assert all(kept.abs().sum() > 0 for kept in before)


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


class Engine(SimpleNamespace):
    """What a division uses of an engine."""

    gradient_average, loss_seen = True, None
    engine_timers = SimpleNamespace(backward_timers=[], backward_inner_timers=[])

    def _start_timers(self, names):
        assert not names

    def backward(self, loss, scale_wrt_gas, **kwargs):
        self.loss_seen = loss
        loss.backward(retain_graph=True)
        return loss


def divided(dtype, rollouts):
    """The loss as it went in, and what was logged, of a loss in `dtype` in a window of 3 rollouts."""
    engine = Engine(module=perceptron(), optimizer=None, torch_autocast_z0_gradscaler=None)
    adapter = Plain(engine)
    adapter.kept.after_backward = lambda: None
    division = Division(adapter, Meter(torch.device("cpu"), None, None), ranks=1, peers=1)
    loss = engine.module(torch.ones(2, 3)).sum().to(dtype)
    weighting = Weighting.configured("rollout", "mean", 3)
    for _ in range(2):
        division.backward(loss.clone(), Counts(rollouts=rollouts), weighting, Window(0, 3, 3, 0, expected=3.0))
    return loss, engine.loss_seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_half_precision_is_divided_in_fp32_and_its_rounded_coefficient_is_said_once(caplog, dtype):
    loss, seen = divided(dtype, rollouts=1)
    assert seen.dtype == torch.float32
    assert torch.equal(seen, loss.float() / 3)
    (said,) = caplog.messages
    assert f"a loss in {str(dtype).removeprefix('torch.')}, in which its coefficient 0.333333333 is 0.33" in said
    assert "logits.float()" in said


@pytest.mark.parametrize(("dtype", "rollouts"), [(torch.bfloat16, 3), (torch.float32, 1), (torch.float64, 1)])
def test_nothing_is_said_of_a_coefficient_that_the_loss_can_hold_or_in_full_precision(caplog, dtype, rollouts):
    divided(dtype, rollouts)
    assert not caplog.messages
