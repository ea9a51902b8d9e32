"""DeepSpeed's rarer options, and a configuration in all its forms, on four ranks: steps are those of one process."""

import argparse
import collections
import json
import os
import types
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.hard.unforeseen.cells import RATE, STAGES, Cell, Found, config
from tests.hard.unforeseen.language import Policy, Process, by_rollout, clipped, rollout
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios(ranks=4)

# Of the section zero_optimization.
OF_ZERO = {
    "round robin": {"round_robin_gradients": True},
    "not contiguous": {"contiguous_gradients": False, "overlap_comm": False},
    "overlapping": {"overlap_comm": True},
    "no scatter": {"reduce_scatter": False},
    "no partitions": {"allgather_partitions": False},
    "small groups": {"sub_group_size": 50},
    "small buckets": {"reduce_bucket_size": 8, "allgather_bucket_size": 8},
    "nothing kept": {
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    },
    "all kept": {"stage3_param_persistence_threshold": 10**9},
    "gathered by sums": {"stage3_use_all_reduce_for_fetch_params": True},
    "modules of one size": {"stage3_module_granularity_threshold": 1},
    "pinned": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "offloaded to nothing": {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
}
ABOVE = {
    "fp32 sums": {"fp32_allreduce": True},
    "no gathers": {"disable_allgather": True},
    "fp32 between ranks": {"communication_data_type": "fp32"},
    "averaged over ranks": {"gradient_allreduce_op": "mean"},
    "fp32 kept": {"data_types": {"grad_accum_dtype": "fp32"}},
    "verbose": {"dump_state": True, "memory_breakdown": True, "wall_clock_breakdown": True, "steps_per_print": 1},
    "profiled": {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}},
    "with a tag": {"checkpoint": {"tag_validation": "Fail"}},
}
# Rollouts of both kinds of ranks in the passes of a window: a window has 18, and two more that the next one forgets.
SIZES = (((1, 2), (2, 1), (1, 3)), ((2, 1), (3, 3)))
TARGET = 18


def trained(case, given, model):
    """Four windows of an engine beside those of one process."""
    right = Process(model, lambda own: torch.optim.SGD(own.parameters(), lr=RATE), clip=0.0)
    engine, *_ = ds_parity.initialize(model=model, model_parameters=list(model.parameters()), **given)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for window in range(4):
        micro_batches = []
        for index, sizes in enumerate(SIZES[window % 2]):
            drawn = [
                [rollout(other, 10 * window + index, number) for number in range(sizes[other % 2])]
                for other in range(ranks)
            ]
            micro_batches += drawn
            engine.backward(_mean(engine, drawn[rank]), rollouts=len(drawn[rank]))
            engine.step()
        count = sum(map(len, micro_batches))
        right.step(sum(len(own) * _mean(right.model, own) for own in micro_batches) / count)
    return Found(right.apart(engine), [engine.global_steps, engine.last_step.loss], [4, right.losses[-1]])


def _mean(model, rollouts):
    return torch.stack([one.mean() for one in clipped(by_rollout(model(rollouts), rollouts), rollouts)]).mean()


def _config(cell, zero=None, **more):
    return config(cell, TARGET, section={"overshoot": "reset"}, zero=zero, **more)


@play.right(STAGES[1:], list(OF_ZERO), bound=1e-5)
def options_of_zero(case):
    """What no trainer's configuration has, and DeepSpeed's documentation does."""
    return trained(case, {"config": _config(case.cell, OF_ZERO[case.variant])}, Policy())


@play.right(STAGES[1:], list(ABOVE), bound=1e-5)
def other_options(case):
    """Of the top level."""
    return trained(case, {"config": _config(case.cell, **ABOVE[case.variant])}, Policy())


FORMS = {
    "a path": lambda plain, path: str(path),
    "an object of pathlib": lambda plain, path: path,
    "a mapping of its own": lambda plain, path: collections.UserDict(plain),
    "a proxy": lambda plain, path: types.MappingProxyType(plain),
    "a chain": lambda plain, path: collections.ChainMap(plain),
    "proxies inside": lambda plain, path: {
        name: types.MappingProxyType(value) if isinstance(value, dict) else value for name, value in plain.items()
    },
    "ordered": lambda plain, path: collections.OrderedDict(plain),
}


@play.right([Cell(2)], [f"{way} {form}" for form in FORMS for way in ("config", "config_params", "args")], bound=1e-5)
def a_configuration_has_any_form(case):
    """Given by either argument, or as --deepspeed_config."""
    way, _, form = case.variant.partition(" ")
    plain, path = _config(case.cell), Path(f"{case.folder}-{dist.get_rank()}.json")
    path.write_text(json.dumps(plain))
    source = FORMS[form](plain, path)
    given = {way: source}
    if way == "args":
        given = {"args": argparse.Namespace(deepspeed_config=source, local_rank=int(os.environ["LOCAL_RANK"]))}
    return trained(case, given, Policy())


ANOTHER = "ConfigError: args.local_rank = 0, and LOCAL_RANK is "


@play.refused([Cell(2)], ("RankDesyncError: ", *(f"{ANOTHER}{rank}" for rank in (1, 2, 3))))
def a_local_rank_is_the_default_of_a_command_line(case):
    """0 on every rank: torchrun passes none."""
    return trained(case, {"config": _config(case.cell), "args": argparse.Namespace(local_rank=0)}, Policy())


@play.refused([Cell(2)], {"text": "ConfigError: config = ", "numpy": "ConfigError: the configuration is refused"})
def a_configuration_has_no_form(case):
    """JSON as a text, and a count of NumPy's, which JSON can't hold."""
    plain = _config(case.cell)
    source = json.dumps(plain) if case.variant == "text" else {**plain, "gradient_accumulation_passes": numpy.int64(18)}
    return trained(case, {"config": source}, Policy())


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_one_process_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_it(outcomes, case):
    outcomes.assert_refused(case)
