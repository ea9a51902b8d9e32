"""Pipelines in which columns, or whole windows, leave out parameters: what a micro-batch uses goes by its data."""

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_parity
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks
from tests.distributed.test_pipelines import HALVES, SHARDED, alone_in_the_process, config
from tests.distributed.test_pipelines_of_ids import WIDTH, Linear, Words, micro_batches, off_from_alone, squares

pytestmark = pytest.mark.ranks


class Branches(nn.Module):
    """Uses one of three layers, by the number of samples."""

    def __init__(self):
        torch.manual_seed(7)
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        return torch.tanh(self.branches[len(x) - 1](x))


def layers():
    return [LayerSpec(Words), LayerSpec(Branches), LayerSpec(Linear, 1), LayerSpec(Branches)]


# The sizes of micro-batches of each column: in the first window columns use other branches, later ones leave some out.
WINDOWS = [[[1, 1], [2]], [[3], [1, 3]], [[2, 2], [2]], [[1], [3]], [[3, 1], [3]]]
SUMS = {**SHARDED["fp32-sums"], **SHARDED["offloaded"]}
KINDS = {"fp32 on 0": (0, {}), "fp32": (1, {}), "bf16 on 0": (0, HALVES), "fp32-sums-offloaded": (1, SUMS)}
KINDS |= {kind: (1, more) for kind, more in SHARDED.items()}
RATE = 0.5
# A gradient in bf16 is off by a hundredth, and a weight by 0.004.
BOUNDS = {"bf16 on 0": 0.04, "fp32-sums": 0.04, "fp32-sums-offloaded": 0.04}


def distance(kind, stages):
    stage, more = KINDS[kind]
    model = deepspeed.PipelineModule(layers(), num_stages=stages, partition_method="uniform", loss_fn=squares)
    keys = config(stage, **{"gradient_clipping": 1e6, **more})
    return off_from_alone(model, layers, keys, rate=RATE, windows=WINDOWS)


def distances(cells):
    results = {}
    for cell in cells:
        kind, stages = cell.split(", ")
        results[cell] = from_all(distance(kind, int(stages)))
        deepspeed.utils.groups.mpu = None
    return results


OFTEN = ("fp32, 1", "fp32-sums, 1", "offloaded, 2")
SELDOM = tuple(cell for kind in KINDS for cell in (f"{kind}, 1", f"{kind}, 2") if cell not in OFTEN)


@on_two_ranks
@alone_in_the_process
def columns_that_use_other_parameters(folder):
    return distances(OFTEN)


@at_length_on_two_ranks
@alone_in_the_process
def columns_that_use_other_parameters_at_length(folder):
    return distances(SELDOM)


@pytest.mark.parametrize("cell", by_length(OFTEN, SELDOM, "two_ranks"))
def test_what_a_window_leaves_out_has_no_gradient(request, cell):
    """By kind and number of stages; see tools/deepspeed_faults/ranks_use_other_parameters.py and stale_gradient.py."""
    usual, at_length = columns_that_use_other_parameters, columns_that_use_other_parameters_at_length
    off = either(request, usual, at_length, seldom=cell in SELDOM)[cell]
    assert max(off) <= BOUNDS.get(cell.split(", ")[0], 1e-5)


@on_two_ranks
@alone_in_the_process
def columns_that_freeze_others(folder):
    """By stage: what a window ends in where columns have frozen other layers, and all the same, and how it goes on."""
    results = {}
    for stage in (0, 1):
        deepspeed.utils.groups.mpu = None
        model = deepspeed.PipelineModule(layers(), num_stages=1, partition_method="uniform", loss_fn=squares)
        engine = ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=config(stage))[0]
        branches = model.forward_funcs[1].branches
        engine.train_window(micro_batches(engine, 0, WINDOWS[0]))
        own = branches[engine.grid.get_data_parallel_id()].weight
        own.requires_grad_(False)
        before = own.detach().clone()
        said = refusal(lambda: engine.train_window(micro_batches(engine, 1, WINDOWS[1])))  # noqa: B023
        kept = bool((own == before).all())
        for one in branches[:2]:
            one.weight.requires_grad_(False)
        alike = refusal(lambda: engine.train_window(micro_batches(engine, 1, WINDOWS[1])))  # noqa: B023
        results[stage] = from_all([said, kept, alike])
    return results


@pytest.mark.parametrize("stage", ["0", "1"])
def test_columns_that_freeze_other_parameters_are_refused(two_ranks, stage):
    for said, kept, alike in two_ranks.of(columns_that_freeze_others)[stage]:
        assert "RankDesyncError" in said
        assert "has frozen other parameters than another column of its stage" in said
        assert kept
        assert alike == "nothing was raised"
