"""Counts of any type and size, and every rule of weighing and of windows, follow an fp64 oracle or are refused."""

from decimal import Decimal
from itertools import product

import numpy
import pytest
import torch
from deepspeed.runtime import lr_schedules

from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched
from tests.hard.unforeseen.oracle import sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

COUNTS = {
    "numpy-int64": numpy.int64(2),
    "numpy-array": numpy.array(2),
    "numpy-uint8": numpy.uint8(200),
    "numpy-int32": numpy.int32(2**30),
    "tensor": torch.tensor(2),
    "tensor-int8": torch.tensor(100, dtype=torch.int8),
    "large": 2**31,
}


@play.right([Cell(2)], COUNTS)
def whole_numbers_of_other_types(case):
    """Beyond what its type can hold where four ranks' worth is added up."""
    watched, count = Watched(case.cell), COUNTS[case.variant]
    for index in range(4):
        watched.engine.backward(watched.loss(index), rollouts=count)
        watched.engine.step()
        _weighed(watched, index, [int(count)] * 2)
    return watched.found([watched.engine.global_samples], [8 * int(count)])


@play.right(STAGES)
def one_rank_brings_a_billion_times_more(case):
    """2**30 rollouts on one rank and one on the other: the total is exact, and every pass closes a window."""
    watched = Watched(case.cell)
    sizes = [2**30, 1]
    for index in range(4):
        watched.engine.backward(watched.loss(index), rollouts=sizes[watched.rank], tokens=2**30)
        watched.engine.step()
        _weighed(watched, index, sizes)
    last = watched.engine.last_step
    return watched.found([last.total, last.tokens], [2**30 + 1, 2**31])


def _weighed(watched, index, weights, counted=None):
    """Tell the oracle of a pass of two samples on every rank that weighs and counts something else."""
    for rank, weight in enumerate(weights):
        x, y = (one.double() for one in sample(rank, index, 2))
        watched.oracle.add(weight, lambda model, x=x, y=y: model(x, y))
    watched.oracle.end_pass(sum(weights) if counted is None else counted)


NO_COUNTS = {
    "true": True,
    "numpy-true": numpy.bool_(True),
    "whole-float": 2.0,
    "numpy-float": numpy.float32(2),
    "a-half": 2.5,
    "negative": -1,
    "nan": float("nan"),
    "infinite": float("inf"),
    "text": "2",
    "decimal-half": Decimal("2.5"),
    "vector": torch.tensor([2, 2]),
}


@play.refused([Cell(2)], dict.fromkeys(NO_COUNTS, "WindowError: rollouts is "))
def what_is_no_count(case):
    """Nothing was counted of it."""
    watched = Watched(case.cell)
    watched.engine.backward(watched.loss(0), rollouts=NO_COUNTS[case.variant])


WEIGHTS = {
    "rollout": lambda size: size,
    "token": lambda size: 3 * size,
    "pass": lambda size: 1,
    "target": lambda size: size,
}
RULES = {"-".join(rules): rules for rules in product(WEIGHTS, ("mean", "sum"), ("carry", "reset"))}


@play.right([Cell(0), Cell(3)], RULES)
def rules_meet_ragged_passes(case):
    """Each weight, reduction and overshoot, over passes of 0 to 4 rollouts a rank."""
    weight, reduction, overshoot = RULES[case.variant]
    section = {"loss_weight": weight, "loss_reduction": reduction, "overshoot": overshoot}
    watched = Watched(case.cell, 11, section=section)
    for index in range(9):
        sizes = [0 if (rank, index % 3) == (1, 1) else 1 + (rank + 2 * index) % 4 for rank in range(watched.ranks)]
        size = sizes[watched.rank]
        loss = watched.loss(index, max(1, size), reduction)
        if size:
            watched.engine.backward(loss, rollouts=size, tokens=3 * size)
        else:
            watched.engine.idle(loss)
        watched.engine.step()
        for rank, one in enumerate(sizes):
            if one:
                x, y = (part.double() for part in sample(rank, index, one))
                units = WEIGHTS[weight](one)
                watched.oracle.add_sum(
                    lambda model, x=x, y=y: model(x, y, reduction),
                    units=units,
                    factor=1 if reduction == "sum" else units,
                )
        watched.oracle.end_pass(sum(sizes))
    return watched.found()


@play.right([Cell(0), Cell(2)], ["carry", "reset"])
def a_pass_brings_several_targets(case):
    """14 and 18 rollouts in windows of 4, with a few behind them."""
    watched = Watched(case.cell, 4, section={"overshoot": case.variant})
    for index, size in enumerate((7, 1, 1, 9, 1, 1)):
        watched.passes([index], size)
    return watched.found()


@play.right(CELLS, ["step", "drop"])
def the_data_ends_in_a_window(case):
    """Three passes and the end, twice: the open window is a step, or is forgotten."""
    watched = Watched(case.cell, section={"last_window": case.variant})
    for start in (0, 3):
        watched.passes(range(start, start + 3))
        watched.engine.finish()
        watched.oracle.finish() if case.variant == "step" else watched.oracle.drop()
    if case.variant == "drop":  # the last record is that of the window that was dropped
        return Found(watched.apart(), [watched.engine.window.passes, watched.engine.global_steps], [0, 2])
    return watched.found([watched.engine.window.passes], [0])


@play.refused([Cell(0), Cell(3)], "WindowError: ")
def the_data_must_not_end_in_a_window(case):
    """The key last_window is "error"."""
    watched = Watched(case.cell, section={"last_window": "error"})
    watched.passes(range(3))
    watched.engine.finish()


@play.right([Cell(0), Cell(2)])
def windows_count_prompts(case):
    """Two rollouts in every pass, and a prompt is finished in every second one."""
    watched = Watched(case.cell, 3, section={"count": "prompt"})
    for index in range(8):
        watched.engine.backward(watched.loss(index), rollouts=2, prompts=index % 2)
        watched.engine.step()
        for rank in range(watched.ranks):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(2, lambda model, x=x, y=y: model(x, y))
        watched.oracle.end_pass(2 * (index % 2), rollouts=4)
    watched.engine.finish()
    return watched.found([watched.engine.global_samples], [32])


@play.right(CELLS)
def passes_weigh_nothing(case):
    """Rollouts without a loss token and tokens of rollouts that are not finished; windows of no token at all."""
    watched = Watched(case.cell, 4, section={"loss_weight": "token"})
    skipped = []
    for index, (rollouts, tokens) in enumerate(((2, 0), (0, 5), (2, 0), (2, 0), (1, 1), (2, 3), (0, 0), (2, 1))):
        watched.engine.backward(watched.loss(index), rollouts=rollouts, tokens=tokens)
        watched.engine.step()
        _weighed(watched, index, [tokens] * 2, counted=2 * rollouts)
        skipped.append(watched.engine.last_step is not None and watched.engine.last_step.skipped)
    return watched.found(skipped, [True, True, False, True, True, False, False, False])


SCHEDULES = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_momentum": False},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1},
}


@play.right([Cell(2)], [f"{name}-{progress}" for name in SCHEDULES for progress in ("optimizer_step", "rollout")])
def deepspeeds_schedules_move_by_steps(case):
    """Windows that close exactly at the target are whole steps of nominal progress, too."""
    name, progress = case.variant.split("-")
    schedule = {"type": name, "params": SCHEDULES[name]}
    watched = Watched(case.cell, section={"lr_progress": progress}, scheduler=schedule)
    alone = getattr(lr_schedules, name)(watched.oracle.optimizer, **SCHEDULES[name])
    got, right = [], []
    for start in range(0, 18, 2):
        right += [group["lr"] for group in watched.oracle.optimizer.param_groups]
        watched.passes(range(start, start + 2))
        got += watched.engine.last_step.lr
        alone.step()
    return watched.found(got, right)


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_what_cannot_be_counted_or_ended(outcomes, case):
    outcomes.assert_refused(case)
