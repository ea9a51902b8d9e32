"""ZeRO 3 that gathers weights by all-reduce: steps are those of an oracle, whatever lies in the padding of weights."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.beside_an_oracle import distance
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

# Weights of up to 1 in bf16 are rounded by up to 2 ** -9 in the beginning, and what is computed with them likewise.
PRECISIONS = {"fp32": ({}, 1e-6), "bf16": ({"bf16": {"enabled": True}}, 2**-8)}
# From this size on parameters are divided: all of them, or none.
SIZES = (0, 10**6)


class Uneven(torch.nn.Sequential):
    """Two ranks divide none of its weights and biases evenly."""

    def __init__(self, _):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

    def forward(self, inputs):
        """Return one number."""
        return super().forward(inputs.to(self[0].weight.dtype)).float().pow(2).mean()


def sample(seed):
    """One of a pass and rank."""
    return torch.randn(1, 5, generator=torch.Generator().manual_seed(seed))


def fill_padding(engine):
    """Let something lie where nobody has written."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for one in engine.module.parameters():
            part = one.ds_tensor
            padding = part.ds_numel * dist.get_world_size() - one.ds_numel
            part.data[part.ds_numel - padding :] = 1e3


def apart(keys, size):
    """How far an engine's weights are from the oracle's at most."""
    zero = {"stage3_use_all_reduce_for_fetch_params": True, "stage3_param_persistence_threshold": size}
    return distance(3, keys, Uneven, sample, zero=zero, meanwhile=fill_padding)


@on_two_ranks
def fetched(folder):
    return {f"{name} {size}": from_all(apart(keys, size)) for name, (keys, _) in PRECISIONS.items() for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_those_of_an_oracle(two_ranks, precision, size):
    assert max(two_ranks.of(fetched)[f"{precision} {size}"]) <= PRECISIONS[precision][1]
