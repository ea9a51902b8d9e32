"""What a loop does to a pipeline between its windows is refused on every rank, or has no part in the step."""

import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

import ds_parity
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_four_ranks, by_length, either, on_four_ranks
from tests.distributed.test_pipelines import alone_in_the_process, config, layers, micro_batches, squares

pytestmark = pytest.mark.ranks
SIZES = [[2, 1], [3]]
HALVES = {"bf16": {"enabled": True}}
CELLS = {"0 fp32": (0, {}), "1 fp32": (1, {}), "0 bf16": (0, HALVES), "1 bf16": (1, HALVES)}
OFTEN, SELDOM = ("1 bf16",), ("0 fp32", "1 fp32", "0 bf16")


class Broken(lr_scheduler.LambdaLR):
    """Its own fault is a TypeError, from the second step on."""

    def step(self, epoch=None):
        return None + 1 if self.last_epoch > 0 else super().step(epoch)


def build(
    cell, stages=2, frozen=(), loss_fn=squares, scheduler=None, given=lambda one: one.requires_grad, by_stage=False
):
    stage, more = CELLS[cell]
    pipeline = deepspeed.PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    for name, one in pipeline.named_parameters():
        one.requires_grad_(name not in frozen)
    trained = [one for one in pipeline.parameters() if given(one)]
    if by_stage and pipeline.stage_id:
        trained = [{"params": [one for one in trained if one.dim() == dim]} for dim in (1, 2)]
    extended = config(stage, **more)
    if scheduler is not None:
        del extended["scheduler"]
    return ds_parity.initialize(model=pipeline, model_parameters=trained, config=extended, lr_scheduler=scheduler)[0]


def trains(engine, window=0):
    return refusal(lambda: engine.train_window(micro_batches(engine, window, SIZES)))


def weights(engine):
    return torch.cat([p.detach().flatten().float() for p in engine.module.parameters()])


@alone_in_the_process
def strays(cell, found):
    engine = build(cell)
    regulariser = sum(p.float().pow(2).sum() for p in engine.module.parameters())
    regulariser.backward()
    begun = weights(engine)
    found["loss.backward()"] = trains(engine)
    found["again"] = trains(engine)
    found["weights as they were"] = bool(torch.equal(weights(engine), begun))

    engine = build(cell)
    if dist.get_rank() == 1:
        sum(p.float().pow(2).sum() for p in engine.module.parameters()).backward()
    found["on one rank"] = trains(engine)

    engine = build(cell)
    trains(engine)
    for p in engine.module.parameters():
        p.grad = torch.ones_like(p)
    found["written"] = trains(engine, 1)
    for p in engine.module.parameters():
        p.grad = None
    found["cleared"] = trains(engine, 1)
    for p in engine.module.parameters():
        p.grad = torch.zeros_like(p)
    found["zeros"] = trains(engine, 2)
    torch.autograd.grad(sum(p.float().pow(2).sum() for p in engine.module.parameters()), [*engine.module.parameters()])
    found["autograd.grad"] = trains(engine, 3)


@alone_in_the_process
def trained(cell, found):
    first = next(name for name, _ in build(cell).module.named_parameters())
    engine = build(cell, frozen=(first,))
    found["frozen from the start"] = trains(engine)
    dict(engine.module.named_parameters())[first].requires_grad_(True)
    found["thawed"] = trains(engine, 1)

    engine = build(cell)
    trains(engine)
    layer = next(one for one in engine.module.modules() if isinstance(one, nn.Linear))
    layer.bias = nn.Parameter(torch.zeros_like(layer.bias))
    found["replaced"] = trains(engine, 1)

    engine = build(cell)
    next(engine.module.parameters()).requires_grad_(False)
    found["frozen later"] = trains(engine)
    for one in engine.module.parameters():
        one.requires_grad_(False)
    found["all frozen"] = trains(engine, 1)
    engine = build(cell, given=lambda one: one.dim() > 1)
    trains(engine)
    found["a part is given"] = trains(engine, 1)
    found["groups of a stage"] = trains(build(cell, by_stage=True))
    with torch.no_grad():
        found["no_grad"] = trains(build(cell))


@alone_in_the_process
def optimizers(cell, found):
    engine = build(cell)
    trains(engine)
    begun = weights(engine)
    found["step"] = refusal(engine.optimizer.step)
    found["step, weights"] = bool(torch.equal(weights(engine), begun))
    later = {"params": [nn.Parameter(torch.zeros(3, device=engine.device))]}
    found["group"] = refusal(lambda: engine.optimizer.add_param_group(later))
    engine = build(cell, scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0))
    rows = engine.optimizer.param_groups
    rows[0]["lr"] = 0.1 * (1 + engine.grid.get_data_parallel_id())
    found["rates apart"] = trains(engine)
    for row in rows:
        row["lr"] = 0.05
    clips = engine.gradient_clipping()
    if engine.grid.get_stage_id():
        engine._config.gradient_clipping = 0.01
    found["clipping apart"] = trains(engine)
    engine._config.gradient_clipping = clips
    found["rates alike"] = trains(engine)
    engine.destroy()
    found["destroyed"] = trains(engine)
    found["plateau"] = refusal(lambda: build(cell, scheduler=lr_scheduler.ReduceLROnPlateau))
    engine = build(cell, scheduler=lambda optimizer: Broken(optimizer, lambda epoch: 1.0))
    found["scheduler, first"] = trains(engine)
    found["scheduler"] = trains(engine, 1)


@alone_in_the_process
def failing(cell, found, folder):
    calls = []

    def loss_fn(outputs, labels):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("no memory left")
        return squares(outputs, labels)

    engine = build(cell, stages=1, loss_fn=loss_fn)
    try:
        engine.train_window(micro_batches(engine, 0, [[2, 1]] * 4))
    except MemoryError as error:
        found["raised"] = str(error)
    found["failed, trains"] = refusal(lambda: engine.train_window(micro_batches(engine, 0, [[2, 1]] * 4)))
    found["failed, saves"] = refusal(lambda: engine.save_checkpoint(folder, tag="failed"))
    found["failed, loads"] = refusal(lambda: engine.load_checkpoint(folder, tag="failed"))


@on_four_ranks
def between_windows(folder):
    return found_in(OFTEN, folder)


@at_length_on_four_ranks
def between_windows_of_others(folder):
    return found_in(SELDOM, folder)


def found_in(cells, folder):
    results = {}
    for cell in cells:
        found = results[cell] = {}
        strays(cell, found)
        trained(cell, found)
        optimizers(cell, found)
        failing(cell, found, str(folder))
    return from_all(results)


MARKED = by_length(OFTEN, SELDOM, "four_ranks")


@pytest.fixture
def found(request, cell):
    """What each rank has found in a cell."""
    every = either(request, between_windows, between_windows_of_others, seldom=cell in SELDOM, fixture="four_ranks")
    return [one[cell] for one in every]


STRAYS = r"WindowError: gradients were changed outside of train_window\(\) before window"
LOST = "WindowError: .*: trained now, but no group of the optimizer holds it"
FAILED = r"WindowError: {} of a pipeline whose train_window\(\) has raised .*MemoryError: no memory left.*new engine"
GOES_ON = "^nothing was raised$"
SAID = {
    "loss.backward()": f"{STRAYS} 0",
    "again": f"{STRAYS} 0",
    "on one rank": f"{STRAYS} 0|RankDesyncError: this rank stops because another did: .*changed outside",
    "written": f"{STRAYS} 1",
    "cleared": GOES_ON,
    "zeros": GOES_ON,
    "autograd.grad": GOES_ON,
    "frozen from the start": GOES_ON,
    "thawed": f"{LOST}|RankDesyncError: .*trained now",
    "replaced": LOST,
    "frozen later": GOES_ON,
    "all frozen": "WindowError: this stage trains nothing in window 1",
    "a part is given": GOES_ON,
    "rates apart": "RankDesyncError: ranks of stage . differ in the learning rate of parameter group 0 .*: their",
    "clipping apart": r"RankDesyncError: ranks differ in gradient_clipping \(rank . has .*; rank . has .*\): each",
    "rates alike": GOES_ON,
    "destroyed": "WindowError: the engine was destroyed|RankDesyncError: this rank stops because another did",
    "no_grad": r"WindowError: train_window\(\) in window 0 under torch.no_grad\(\)",
    "plateau": "ConfigError: a pipeline with the scheduler ReduceLROnPlateau, whose step.* needs metrics",
    "scheduler, first": GOES_ON,
    "scheduler": "WindowError: step.* of the scheduler Broken has raised TypeError",
    "raised": "no memory left",
    "failed, trains": FAILED.format(r"train_window\(\)"),
    "failed, saves": FAILED.format(r"save_checkpoint\(\)"),
    "failed, loads": FAILED.format(r"load_checkpoint\(\)"),
}


@pytest.mark.parametrize("case", SAID)
@pytest.mark.parametrize("cell", MARKED)
def test_what_is_done_between_windows(found, cell, case):
    for one in found:
        assert re.search(SAID[case], one[case], re.DOTALL), one[case]


@pytest.mark.parametrize("cell", MARKED)
def test_stages_with_other_numbers_of_groups_are_refused_where_they_add_up_a_norm_for_each(found, cell):
    said = "RankDesyncError: rank ., of stage 1 of the pipeline, has parameters in 2 parameter groups"
    for one in found:
        assert re.search(said if cell[0] == "1" else GOES_ON, one["groups of a stage"]), one["groups of a stage"]


@pytest.mark.parametrize("cell", MARKED)
def test_no_weight_moves_by_what_is_refused(found, cell):
    for one in found:
        assert one["weights as they were"]
        assert one["step, weights"]


@pytest.mark.parametrize("cell", MARKED)
def test_optimizers_in_wrappers_are_the_engines(found, cell):
    """On ZeRO 0 in fp32 there is none: torch's own does nothing between windows, and takes new groups."""
    for one in found:
        said = [one["step"], one["group"]]
        if cell == "0 fp32":
            assert said == ["nothing was raised"] * 2
        else:
            assert "was called by itself" in said[0]
            assert "add_param_group() on ZeRO stage" in said[1]
