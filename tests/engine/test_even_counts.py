"""DeepSpeed's Adam with one count of steps for a group, by itself: what its hooks, errors and loads leave."""

import pytest
import torch
from deepspeed.ops.adam import FusedAdam

from ds_parity.engine.internals.fused_adam import EvenCounts

pytestmark = pytest.mark.slow  # its kernel may have to be compiled
RATES = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}


def made(*dtypes):
    """Three weights, two of which may be of other dtypes, and their optimizer."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4).to(dtype)) for dtype in (torch.float32, *dtypes)]
    optimizer = FusedAdam(weights, **RATES)
    EvenCounts(optimizer)
    return weights, optimizer


def stepped(weights, optimizer, number, trained=None):
    draw = torch.Generator().manual_seed(number)
    for at, weight in enumerate(weights):
        gradient = torch.randn(4, generator=draw).to(weight.dtype)
        weight.grad = gradient if trained is None or at in trained else None
    optimizer.step()


def due(steps):
    """The first weight, alone in torch's AdamW in float64."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4).double())
    optimizer = torch.optim.AdamW([weight], **RATES)
    for number in range(steps):
        weight.grad = torch.randn(4, generator=torch.Generator().manual_seed(number)).double()
        optimizer.step()
    return weight.detach()


MIXED = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, MIXED])
@pytest.mark.parametrize("trained", [None, (0,), (0, 1)])
def test_a_weight_steps_as_it_does_alone_whatever_the_others_do(dtypes, trained):
    weights, optimizer = made(*dtypes)
    for number in range(5):
        stepped(weights, optimizer, number, trained if number > 1 else None)
    assert weights[0].detach().double() == pytest.approx(due(5), abs=1e-6)
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}


def test_an_error_in_a_step_leaves_the_groups_as_they_are():
    weights, optimizer = made(*MIXED)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
    stepped(weights, optimizer, 0)
    weights[1].grad = torch.sparse_coo_tensor([[0]], [1.0], (4,), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for number in range(1, 4):
        stepped(weights, optimizer, number)
        scheduler.step()
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.param_groups[0]["params"]) == 3
    assert weights[0].detach().double() == pytest.approx(due(4), abs=1e-6)


def test_a_step_that_raises_is_not_counted():
    weights, optimizer = made(*MIXED)
    stepped(weights, optimizer, 0)
    weights[0].data = weights[0].data.to(torch.float64)  # of which its kernel knows nothing
    with pytest.raises(RuntimeError):
        stepped(weights, optimizer, 1)
    weights[0].data = weights[0].data.to(torch.float32)
    stepped(weights, optimizer, 1)
    assert weights[0].detach().double() == pytest.approx(due(2), abs=1e-6)


def test_what_hooks_write_into_a_group_counts():
    weights, optimizer = made(*MIXED)
    optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0].update(lr=0.0))
    stepped(weights, optimizer, 0)
    held = weights[0].detach().clone()
    stepped(weights, optimizer, 1)
    assert torch.equal(weights[0].detach(), held)


def test_counts_that_are_tensors_and_two_at_once_count_each_step_once():
    weights, optimizer = made(*MIXED)
    EvenCounts(optimizer)
    for number in range(2):
        stepped(weights, optimizer, number)
        for state in optimizer.state.values():
            state["step"] = torch.tensor(float(state["step"]))
    stepped(weights, optimizer, 2)
    assert [state["step"] for state in optimizer.state.values()] == [3, 3, 3]
    assert weights[0].detach().double() == pytest.approx(due(3), abs=1e-6)


def test_groups_count_for_themselves():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    optimizer = FusedAdam([{"params": [weights[0]]}], **RATES)
    EvenCounts(optimizer)
    for number in range(2):
        stepped(weights[:1], optimizer, number)
    optimizer.add_param_group({"params": [weights[1]]})
    for number in range(2, 4):
        stepped(weights, optimizer, number)
    assert [optimizer.state[weight]["step"] for weight in weights] == [4, 2]
    assert [group["step"] for group in optimizer.param_groups] == [4, 2]
    assert weights[0].detach().double() == pytest.approx(due(4), abs=1e-6)
