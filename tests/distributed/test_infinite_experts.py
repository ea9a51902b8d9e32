"""A gradient of one rank's experts that is not finite: every rank skips the step on ZeRO 0."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.infinite import KINDS, assert_all_skip, three_steps
from tests.distributed.sets import on_two_ranks
from tests.distributed.test_pipelines import alone_in_the_process
from tests.distributed.test_pipelines_of_experts import WIDTH, Experts

pytestmark = pytest.mark.ranks


def _steps(keys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 1))
    parameters = in_groups([{"params": list(model.parameters()), "name": "all"}])
    made = {**config(0, passes=2), "gradient_clipping": 0, **keys}
    del made["optimizer"], made["scheduler"]
    engine = ds_parity.initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=0.1), config=made)[0]
    own = next(one for name, one in model.named_parameters() if "deepspeed_experts" in name)

    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(engine.device)
    return three_steps(
        engine,
        own,
        lambda: engine(x).float().square().mean(),
        model[0].weight.tolist,
        infinite=dist.get_rank() == 1,
    )


@on_two_ranks
@alone_in_the_process
def infinite_experts(folder):
    return from_all({name: _steps(keys) for name, keys in KINDS.items()})


@pytest.mark.parametrize("name", KINDS)
def test_all_ranks_skip_a_step_of_which_one_has_an_infinite_expert(two_ranks, name):
    assert_all_skip([found[name] for found in two_ranks.of(infinite_experts)])
