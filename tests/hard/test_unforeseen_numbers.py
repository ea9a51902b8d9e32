"""Losses, metrics, weights and checkpoints of forms that nobody planned for."""

import itertools
import os
import pathlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import RATE, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios
from tests.hard.unforeseen.whole_windows import Beside

play = Scenarios()

METRICS = {
    "half": (torch.full((100,), 1000.0, dtype=torch.float16), None, 1000.0),
    "bfloat": (torch.ones(1001, dtype=torch.bfloat16), None, 1.0),
    "bfloat-weights": (
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1000.0, 1.0, 3.0], dtype=torch.bfloat16),
        1.0,
    ),
    "half-weights": (
        torch.full((3,), 60000.0, dtype=torch.float16),
        torch.full((3,), 60000.0, dtype=torch.float16),
        60000.0,
    ),
    "int8": (torch.full((10,), 100, dtype=torch.int8), torch.full((10,), 100, dtype=torch.int8), 100.0),
    "int32": (torch.full((10,), 2**31 - 1, dtype=torch.int32), None, float(2**31 - 1)),
    "uint8": (torch.full((10,), 200, dtype=torch.uint8), torch.full((10,), 200), 200.0),
    "int64": (torch.full((4,), 2**60), None, float(2**60)),
    "numpy": (np.float32(0.1), np.float64(3.0), float(np.float32(0.1))),
    "numpy-int": (np.int8(100), np.int8(100), 100.0),
    "big-weight": (2.0, 1e300, 2.0),
    "small-weight": (2.0, 1e-300, 2.0),
    "with-graph": (torch.ones(3, requires_grad=True) * 2, None, 2.0),
    "view": (
        torch.arange(12.0).reshape(3, 4)[:, 1],
        torch.arange(12.0).reshape(3, 4)[:, 2],
        (1 * 2 + 5 * 6 + 9 * 10) / 18,
    ),
}


@play.right([Cell(0), Cell(3)], METRICS)
def metrics_have_small_types(case):
    value, weight, mean = METRICS[case.variant]
    watched = Beside(case.cell)
    got = []
    for index in range(4):
        watched.engine.record("metric", value, weight)
        watched.passes([index])
        if index % 2:
            got.append(float(watched.engine.last_step.metrics["metric"]))
    return watched.found(got, [mean, mean])


def _in_place(loss):
    loss.mul_(1.0)
    return loss


LOSSES = {
    "view": lambda loss: torch.stack([loss, loss * 3])[0],
    "unbound": lambda loss: torch.stack([loss, loss * 3]).unbind()[0],
    "split": lambda loss: torch.stack([loss, loss * 3]).split(1)[0],
    "in-place": _in_place,
    "expanded": lambda loss: loss.expand(1),
    "as-strided": lambda loss: loss.reshape(1).expand(4)[2:3],
    "squeezed": lambda loss: loss.reshape(1, 1, 1).squeeze(0),
    "index": lambda loss: torch.stack([loss, loss])[torch.tensor([0])],
    "double": lambda loss: loss.double(),
    "added": lambda loss: sum([loss / 2, loss / 2]),
    "contiguous": lambda loss: loss.reshape(1, 1).t(),
    "parts": lambda loss: torch.utils.checkpoint.checkpoint(lambda one: 1.0 * one, loss, use_reentrant=False),
    "compiled": torch.compile(lambda loss: (loss * 2).exp().log() / 2, backend="eager"),
    "compiled-aot": torch.compile(lambda loss: (loss * 2) / 2, backend="aot_eager"),
}


@play.right(STAGES, LOSSES)
def losses_are_views_and_are_changed(case):
    """In place, before the backward and behind it; what backward() returned is changed, too."""
    watched = Beside(case.cell)
    for index in range(6):
        loss = LOSSES[case.variant](watched.loss(index))
        scaled = watched.engine.backward(loss, rollouts=2)
        with torch.no_grad():
            if not loss._is_view():
                loss.mul_(100.0)
            scaled.mul_(0.0)
        watched.engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
    return watched.found()


@play.right(STAGES, ["loss", "whole", "inside"])
def a_loop_is_compiled_in_part(case):
    """torch.compile() around what calls the engine."""
    watched = Beside(case.cell)
    engine = watched.engine

    def forward(x, y):
        return engine(x, y)

    def whole(x, y):
        loss = engine(x, y)
        engine.backward(loss, rollouts=2)
        engine.step()

    compiled = torch.compile(whole if case.variant == "whole" else forward, backend="eager")
    for index in range(6):
        if case.variant == "whole":
            compiled(*watched.inputs(index))
        else:
            engine.backward(compiled(*watched.inputs(index)), rollouts=2)
            engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
    torch._dynamo.reset()
    return watched.found()


WEIGHTS = {
    "tiny": [1e-300, 3e-300],
    "apart": [1e-15, 1e15],
    "huge": [1e300, 3e300],
    "small": [1e-40, 3e-40],
    "mixed": [1e-12, 1.0],
}


@play.right(STAGES, [f"{name}-{mode}" for name in WEIGHTS for mode in ("rollouts", "caller", "expected")])
def weights_are_extreme(case):
    """Of a window's two passes, in either order."""
    name, mode = case.variant.split("-")
    caller = {} if mode == "rollouts" else {"boundary": "caller"}
    watched = Beside(case.cell, section={"loss_weight": "weight", **caller})
    for window in range(4):
        weights = WEIGHTS[name][:: 1 if window % 2 else -1]
        if mode == "expected":
            watched.engine.expect(weight=sum(weights))
        for number, weight in enumerate(weights):
            index = 2 * window + number
            watched.engine.backward(watched.loss(index), rollouts=2, weight=weight)
            if mode == "rollouts":
                watched.engine.step()
            watched.has(index, weight, weight)
        if mode != "rollouts":
            watched.engine.step()
        watched.steps()
    return watched.found()


@play.right([Cell(0), Cell(2), Cell(3)], ["most", "one-rank"])
def tokens_are_as_many_as_can_be(case):
    watched = Beside(case.cell, section={"loss_weight": "token"})
    for index in range(4):
        tokens = 2**40 if case.variant == "most" or watched.rank else index + 1
        watched.engine.backward(watched.loss(index), rollouts=2, tokens=tokens)
        watched.engine.step()
        watched.has(index, 2**40 if case.variant == "most" else index + 1, 2**40)
        if index % 2:
            watched.steps()
    return watched.found()


@play.right(STAGES, ["forward", "all", "cache"])
def the_loop_runs_under_autocast(case):
    """In bf16, beside the fp32 of the engine: all ranks and the last step agree with plain torch under autocast."""
    watched = Beside(case.cell)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    around = torch.autocast("cpu", dtype=torch.bfloat16)
    for window in range(3):
        for index in (2 * window, 2 * window + 1):
            if case.variant == "all":
                with around:
                    watched.engine.backward(watched.loss(index).float(), rollouts=2)
                    watched.engine.step()
            else:
                with around:
                    loss = watched.loss(index)
                watched.engine.backward(loss.float(), rollouts=2)
                watched.engine.step()
        optimizer.zero_grad()
        for index, rank in itertools.product((2 * window, 2 * window + 1), range(watched.ranks)):
            with around:
                loss = model(*sample(rank, index, 2))
            (loss.float() / 4).backward()
        optimizer.step()
    right = {name: one.detach().double() for name, one in model.named_parameters()}
    return Found(distance(weights_of(watched.engine), right) * 1e-3, [watched.engine.global_steps], [3])


TAGS = {
    "int": 5,
    "slash": "a/b",
    "path": pathlib.PurePosixPath("c"),
    "unicode": "schön 1",
    "none": None,
    "number": np.int64(7),
}


@play.right([Cell(0), Cell(2), Cell(3)], TAGS)
def checkpoints_have_odd_tags(case):
    tag, folder = TAGS[case.variant], Path(case.folder)
    watched = Beside(case.cell)
    watched.passes(range(4))
    state = {"tensor": torch.ones(3), "path": "x", 5: "int", "nested": {"ds_parity": 1}}
    watched.engine.save_checkpoint(folder, tag, client_state=state)
    watched.engine.backward(watched.loss(90), rollouts=2)
    watched.engine.step()
    path, got = watched.engine.load_checkpoint(folder, tag)
    watched.passes(range(4, 8))
    latest = (folder / "latest").read_text()
    return watched.found(
        [path is not None, got[5], latest], [True, "int", str(tag) if tag is not None else "global_step2"]
    )


@play.refused(STAGES, "CheckpointError: load_checkpoint(")
def a_run_goes_on_with_load_universal_still_set(case):
    """A regular checkpoint is loaded with the configuration of a universal one."""
    extended = config(case.cell, optimizer=False)
    extended["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    engine = engine_of(extended)
    for index in range(2):
        engine.backward(engine(*sample(dist.get_rank(), index, 2)), rollouts=2)
        engine.step()
    engine.save_checkpoint(case.folder, "a")
    engine_of({**extended, "checkpoint": {"load_universal": True}}).load_checkpoint(case.folder, "a")


@play.right(CELLS, ["inside", "between"])
def weights_are_exported(case):
    """By save_16bit_model() inside windows and between them, and by zero_to_fp32 of a checkpoint."""
    watched = Beside(case.cell, zero={"stage3_gather_16bit_weights_on_model_save": True})
    seen = []
    for index in range(6):
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
        if (case.variant == "inside") == (index % 2 == 0):
            watched.engine.save_16bit_model(case.folder, f"{index}.pt")
            dist.barrier()
            loaded = torch.load(f"{case.folder}/{index}.pt")
            seen.append(distance({n: one.double() for n, one in loaded.items()}, watched.right()) < 1e-6)
        if index % 2 and case.cell.stage:
            watched.engine.save_checkpoint(case.folder, f"t{index}")
            loaded = get_fp32_state_dict_from_zero_checkpoint(case.folder, f"t{index}")
            seen.append(distance({n: one.double() for n, one in loaded.items()}, watched.right()) < 1e-6)
    return watched.found([all(seen)], [True])


@play.right(STAGES, ["relative", "home"])
def the_trace_is_named_by_a_relative_path(case):
    """And the loop goes to another folder on the way."""
    folder = Path(case.folder)
    for name in ("here", "there"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    before = Path.cwd()
    try:
        os.chdir(folder / "here")
        watched = Beside(case.cell, section={"trace": "trace.jsonl"})
        if case.variant == "home":
            watched.passes(range(2))
        os.chdir(folder / "there")
        watched.passes(range(2, 6))
        found = watched.found()
    finally:
        os.chdir(before)
    dist.barrier()
    lines = (folder / "here" / "trace.jsonl").read_text().splitlines()
    found.got += [len(lines) - 1, sorted(one.name for one in (folder / "there").iterdir())]
    found.right += [2 + (case.variant == "home"), []]
    return found


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
