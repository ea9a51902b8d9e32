"""Pipelines whose stages share several weights of a tied layer, and do not all use each."""

import functools

import deepspeed
import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks
from tests.distributed.test_pipelines import HALVES, SHARDED, alone_in_the_process, config
from tests.distributed.test_pipelines_of_ids import WIDTH, WORDS, linear, off_from_alone, squares

pytestmark = pytest.mark.ranks


class Two(nn.Module):
    """An embedding with a second table of the same shape."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WORDS, WIDTH)) for _ in range(2))

    def forward(self, x):
        return nn.functional.embedding(x, self.a)


def by_b(tied, x):
    return x @ tied.b.t()


def by_both(tied, x):
    return x @ (tied.a + tied.b).t()


def by_a(tied, x):
    return x @ tied.a.t()


def between(head, first=None):
    shared = {"tied_weight_attr": ["a", "b"]}
    tied = [TiedLayerSpec("two", Two, forward_fn=it, **shared) for it in (first, head)]
    return [tied[0], *linear(2), tied[1]]


def both_tables(tied, x):
    return nn.functional.embedding(x, tied.a + tied.b)


# By what the stages use.
USES = {"a and b": (by_b, None), "a and both": (by_both, None), "both and a": (by_a, both_tables), "a": (by_a, None)}
KINDS = {
    "fp32 on 0": (0, {}),
    "fp32": (1, {}),
    "bf16 on 0": (0, HALVES),
    **{kind: (1, it) for kind, it in SHARDED.items()},
}
RATE = 1.0  # so that another gradient shows beside the rounding of bf16
# A gradient in bf16 is off by a hundredth, and a weight by 0.004.
BOUNDS = {"bf16 on 0": 0.04, "fp32-sums": 0.04}


def distance(uses, kind):
    stage, more = KINDS[kind]
    layers = functools.partial(between, *USES[uses])
    model = deepspeed.PipelineModule(layers(), num_stages=2, partition_method="uniform", loss_fn=squares)
    return off_from_alone(model, layers, config(stage, **{"gradient_clipping": 1e6, **more}), rate=RATE)


def distances(cells):
    results = {}
    for kind in cells:
        for uses in USES:
            results[f"{uses}, {kind}"] = from_all(distance(uses, kind))
            deepspeed.utils.groups.mpu = None
    return results


OFTEN = ("fp32",)
SELDOM = tuple(kind for kind in KINDS if kind not in OFTEN)


@on_two_ranks
@alone_in_the_process
def weights_that_some_stages_use(folder):
    return distances(OFTEN)


@at_length_on_two_ranks
@alone_in_the_process
def weights_that_some_stages_use_at_length(folder):
    return distances(SELDOM)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("kind", by_length(OFTEN, SELDOM, "two_ranks"))
def test_what_some_stages_use_of_a_tied_layer_has_its_own_gradient(request, kind, uses):
    """See tools/deepspeed_faults/tied_weights_unused.py."""
    usual, at_length = weights_that_some_stages_use, weights_that_some_stages_use_at_length
    off = either(request, usual, at_length, seldom=kind in SELDOM)[f"{uses}, {kind}"]
    assert max(off) <= BOUNDS.get(kind, 1e-5)
