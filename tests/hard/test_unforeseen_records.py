"""What is recorded, and the ways in which an engine is asked for: every rank has the oracle's numbers, or refuses."""

import base64
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import numpy
import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.engines import from_all
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched, config
from tests.hard.unforeseen.oracle import Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

# A value with its weight, and their sum of weight times value over the sum of weights.
METRICS = {
    "true": ((True,), 1.0),
    "numpy": ((numpy.float64(3.0),), 3.0),
    "of-one": ((torch.tensor([4.0]),), 4.0),
    "whole": ((torch.tensor([1, 2]),), 1.5),
    "truths": ((torch.tensor([True, False]),), 0.5),
    "bf16": ((torch.tensor([1.0, 256.0], dtype=torch.bfloat16),), 128.5),
    "with-a-graph": ((torch.tensor(2.0, requires_grad=True),), 2.0),
    "nan-without-weight": ((torch.tensor([float("nan"), 2.0]), torch.tensor([0.0, 1.0])), 2.0),
    "large": ((1e280, 2**40), 1e280),
    "\N{LATIN SMALL LETTER U WITH DIAERESIS}\n": ((5.0,), 5.0),
    "loss": ((7.0,), 7.0),
}


@play.right([Cell(0), Cell(3)])
def metrics_of_other_types(case):
    """All in one window, under names of any kind."""
    watched = Watched(case.cell)
    watched.engine.backward(watched.loss(0, 4), rollouts=4)
    for name, (given, _) in METRICS.items():
        watched.engine.record(name, *given)
    watched.engine.step()
    watched.noted(0, 4)
    metrics = watched.engine.last_step.metrics
    return watched.found([metrics[name] for name in METRICS], [right for _, right in METRICS.values()])


@play.right([Cell(0), Cell(3)])
def ranks_record_different_metrics(case):
    """By rank another value, weight and name; a tensor that is changed later; a NaN that weighs nothing."""
    watched = Watched(case.cell)
    got, right = [], []
    for index in range(4):
        watched.engine.backward(watched.loss(index, 4), rollouts=4)
        watched.engine.record("own", float(watched.rank), watched.rank + 1)
        watched.engine.record("rests", float("nan") if watched.rank else 3.0, 1 - watched.rank)
        changed = torch.tensor([1.0, 2.0])
        watched.engine.record("changed", changed)
        changed.mul_(100.0)
        if watched.rank == index % 2:
            watched.engine.record(f"only-{index}", 5.0)
        watched.engine.step()
        watched.noted(index, 4)
        metrics = watched.engine.last_step.metrics
        got.append([metrics[name] for name in ("rests", "changed", f"only-{index}")])
        right.append([3.0, 1.5, 5.0])
        got.append(metrics["own"])
        right.append(2 / 3)
    return watched.found(got, right)


NO_METRICS = {
    "nothing": ("name", None),
    "text": ("name", "1"),
    "list": ("name", [1, 2]),
    "array": ("name", numpy.array([1.0, 2.0])),
    "matrix": ("name", torch.ones(2, 2)),
    "complex": ("name", 1j),
    "complex-tensor": ("name", torch.tensor([1j])),
    "weight-negative": ("name", 1.0, -1),
    "weight-nan": ("name", 1.0, float("nan")),
    "weight-infinite": ("name", torch.tensor([1.0]), torch.tensor([float("inf")])),
    "weight-text": ("name", 1.0, "1"),
    "weights-of-another-length": ("name", torch.ones(2), torch.ones(3)),
    "number-for-a-name": (3, 1.0),
    "empty-name": ("", 1.0),
}


@play.refused([Cell(0)], dict.fromkeys(NO_METRICS, "WindowError: record("))
def what_is_no_metric(case):
    """It is refused where it is recorded."""
    Watched(case.cell).engine.record(*NO_METRICS[case.variant])


def _file(path, text):
    if dist.get_rank() == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    dist.barrier()
    return path


def _hjson(extended):
    return "{\n  # what people write into theirs\n" + json.dumps(extended, indent=1)[1:]


# How a configuration is handed over.
FORMS = {
    "path": lambda one, folder: {"config": _file(f"{folder}/a.json", json.dumps(one))},
    "hjson": lambda one, folder: {"config": _file(f"{folder}/a.hjson", _hjson(one))},
    "base64": lambda one, folder: {"config": base64.urlsafe_b64encode(json.dumps(one).encode()).decode()},
    "dict": lambda one, folder: {"config": one},
    "config-params": lambda one, folder: {"config_params": one},
    "arguments": lambda one, folder: {
        "args": SimpleNamespace(deepspeed_config=_file(f"{folder}/b.json", json.dumps(one)), local_rank=dist.get_rank())
    },
}


@play.right([Cell(2)], FORMS)
def configurations_of_other_forms(case):
    """Files, text, arguments; a dictionary is left as it was, and what becomes of it later changes nothing."""
    watched = Watched(case.cell)
    extended = config(case.cell)
    kept, model = copy.deepcopy(extended), Net()
    given = FORMS[case.variant](extended, case.folder)
    watched.engine = ds_parity.initialize(model=model, model_parameters=list(model.parameters()), **given)[0]
    untouched = extended == kept
    extended.update(gradient_accumulation_passes=2, ds_parity={"overshoot": "error", "loss_weight": "pass"})
    extended["optimizer"]["params"]["lr"] = 99
    watched.passes(range(7))
    return watched.found([untouched], [True])


NO_SETTINGS = {
    "no-passes": {"gradient_accumulation_passes": 0},
    "negative-passes": {"gradient_accumulation_passes": -1},
    "a-half": {"gradient_accumulation_passes": 2.5},
    "no-micro-batch": {"train_micro_batch_size_per_gpu": 0},
    "list": {"ds_parity": []},
    "misspelt": {"ds_parity": {"lookahed": 1}},
    "no-time": {"ds_parity": {"exchange_timeout": 0}},
    "negative-look-ahead": {"ds_parity": {"lookahead": -1}},
    "trace-number": {"ds_parity": {"trace": 3}},
}


@play.refused([Cell(2)], dict.fromkeys(NO_SETTINGS, "ConfigError: "))
def what_is_no_configuration(case):
    """It is refused before an engine is built."""
    model = Net()
    extended = {**config(case.cell), **NO_SETTINGS[case.variant]}
    ds_parity.initialize(model=model, model_parameters=list(model.parameters()), config=extended)


@play.right([Cell(0), Cell(2), Cell(3)])
def install_is_taken_back_in_the_middle(case):
    """Twice installed, and a loop of DeepSpeed's own goes on behind the end of both; new engines are bare again."""
    watched, model, before = Watched(case.cell), Net(), deepspeed.initialize
    extended = {**config(case.cell, 8), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_passes": 4}
    with ds_parity.install():
        inner = ds_parity.install()
        watched.engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=extended)[
            0
        ]
        _plain_loop(watched, range(5))
        inner.uninstall()
        inner.uninstall()
    _plain_loop(watched, range(5, 9))
    return watched.found([deepspeed.initialize is before], [True])


def _plain_loop(watched, indices):
    for index in indices:
        watched.engine.backward(watched.loss(index))
        watched.engine.step()
        watched.noted(index)


@play.right(CELLS)
def a_framework_says_where_windows_end(case):
    """By set_gradient_accumulation_boundary, before every backward."""
    watched, model = Watched(case.cell), Net()
    extended = {**config(case.cell), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_passes": 4}
    with ds_parity.install():
        watched.engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=extended)[
            0
        ]
        for index in range(8):
            watched.engine.set_gradient_accumulation_boundary(index % 2 == 1)
            _plain_loop(watched, [index])
    last = watched.engine.last_step
    return Found(watched.apart(), [last.rollouts, watched.engine.global_steps], [8, 4])


class Rows(torch.utils.data.Dataset):
    """16 samples, which DeepSpeed's loader deals to the ranks."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = sample(0, index, 1)
        return x[0], y[0]


@play.right(STAGES)
def deepspeeds_loader_feeds_the_loop(case):
    """What `training_data` makes: two samples a pass on each rank, the usual number of rollouts."""
    watched, model = Watched(case.cell), Net()
    extended = {**config(case.cell), "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_passes": 4}
    watched.engine, _, loader, _ = ds_parity.initialize(
        model=model, model_parameters=list(model.parameters()), config=extended, training_data=Rows()
    )
    for x, y in loader:
        watched.engine.backward(watched.engine(x.to(watched.engine.device), y.to(watched.engine.device)))
        watched.engine.step()
        for own in from_all([x.tolist(), y.tolist()]):
            rows, labels = (torch.tensor(one, dtype=torch.float64) for one in own)
            watched.oracle.add(2, lambda model, rows=rows, labels=labels: model(rows, labels))
        watched.oracle.end_pass(4)
    return watched.found([len(loader)], [4])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_has_the_oracles_numbers(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses_what_is_no_metric_or_setting(outcomes, case):
    outcomes.assert_refused(case)
