"""Experts on different ranks of which a part is frozen: each rank gets its own back from a checkpoint."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as in_groups
from torch import nn

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
WIDTH, STAGES = 4, (0, 1, 2)
ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
WAYS = {"whole": {}, "alone": ALONE, "by a function": {"custom_load_fn": lambda src, dst: dst.load_state_dict(src)}}


class _Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tuned = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.tuned(x)


class _Net(nn.Module):
    def __init__(self, seed, ep_size):
        super().__init__()
        torch.manual_seed(2 * seed + dist.get_rank() * (ep_size > 1))
        self.experts = MoE(WIDTH, _Expert(), num_experts=4, ep_size=ep_size, k=1, use_rts=False, min_capacity=0)
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        gate = self.experts.deepspeed_moe.gate.wg.weight
        gate.data.copy_(torch.randn(gate.shape))
        for number, one in enumerate(self.experts.parameters()):
            one.data.add_(number)  # the experts of a layer are copies of one

    def forward(self, x):
        return self.experts(self.first(x))[0].square().mean()


def _engine(stage, ep_size, seed):
    model = _Net(seed, ep_size)
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = in_groups([{"params": trained, "name": "all"}])
    keys = config(stage, passes=2)
    del keys["scheduler"]
    return ds_parity.initialize(model=model, model_parameters=groups, config=keys)[0]


def _held(engine):
    return {name: one.detach().tolist() for name, one in engine.module.named_parameters()}


@at_length_on_two_ranks
def experts_frozen(folder):
    """By stage, `ep_size` and way: the names of what a new engine has otherwise behind a load, on each rank."""
    results = {}
    for stage in STAGES:
        for ep_size in (1, 2):
            path = f"{folder}/{stage}-{ep_size}"
            saved = _engine(stage, ep_size, 0)
            saved.backward(saved(torch.randn(3, WIDTH).to(saved.device)), rollouts=1)
            saved.step()
            saved.save_checkpoint(path, tag="one")
            experts = sum(map(is_moe_param, saved.module.parameters()))
            for way, options in WAYS.items():
                engine = _engine(stage, ep_size, 1)
                engine.load_checkpoint(path, tag="one", **options)
                had, has = _held(saved), _held(engine)
                apart = [name for name in had if had[name] != has[name]]
                results[f"{stage} {ep_size} {way}"] = from_all([experts, apart])
    return results


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_gets_its_own_frozen_experts_back(two_ranks_at_length, stage, ep_size, way):
    found = two_ranks_at_length.of(experts_frozen)[f"{stage} {ep_size} {way}"]
    assert found == [[4 * 4 // ep_size, []]] * 2
