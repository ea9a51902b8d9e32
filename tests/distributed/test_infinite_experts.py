"""A gradient of one rank's experts that is not finite: every rank skips the step on ZeRO 0."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_pipelines import alone_in_the_process
from tests.distributed.test_pipelines_of_experts import WIDTH, Experts

pytestmark = pytest.mark.ranks
KINDS = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.2},
    "fp16 by autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


def _steps(keys):
    """Of three steps whether each was skipped, the loss scale, and a weight: in the second one rank's are infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    parameters = in_groups([{"params": list(model.parameters()), "name": "all"}])
    made = {**config(0, passes=2), "gradient_clipping": 0, **keys}
    del made["optimizer"], made["scheduler"]
    engine = ds_parity.initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=0.1), config=made)[0]
    own = next(one for name, one in model.named_parameters() if "deepspeed_experts" in name)

    def step(factor):
        hook = own.register_hook(lambda gradient: gradient * factor)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(engine.device)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        hook.remove()
        scaler = engine.torch_autocast_z0_gradscaler
        return engine.last_step.skipped, scaler and scaler.get_scale(), model[0].weight.tolist()

    for _ in range(16):  # until the loss scale of fp16 fits
        begun = step(1.0)
        if not begun[0]:
            break
    found = [begun, step(torch.inf if dist.get_rank() else 1.0), step(1.0)]
    engine.destroy()
    return found


@on_two_ranks
@alone_in_the_process
def infinite_experts(folder):
    return from_all({name: _steps(keys) for name, keys in KINDS.items()})


@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_skip_a_step_of_which_one_has_an_infinite_expert(two_ranks, name):
    first, second = two_ranks.of(infinite_experts)
    assert first[name] == second[name]
    (_, scale, weights), (skipped, _, weights_there), (skipped_then, scale_then, weights_then) = first[name]
    assert skipped
    assert weights == weights_there != weights_then
    assert not skipped_then
    if "fp16" in name:
        assert scale_then == scale / 2
