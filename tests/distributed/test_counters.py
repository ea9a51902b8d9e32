"""DeepSpeed's counters, timer and monitors, which know windows of any number of passes and rollouts."""

import csv
import math
import re
from itertools import pairwise
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, forward, one_pass, perceptron
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def counters(folder):
    """Uneven windows, an empty one, one ended by finish(), and a load into a fresh engine."""
    results = {}
    for stage in STAGES:
        extended = config(stage, passes=4, loss_weight="token")
        engine = build(extended)
        clocks = []

        def note(engine, clocks=clocks):
            counted = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
            clocks.append([*counted, engine.get_lr()[0], engine.last_step.lr[0], engine.last_step.step])

        for rollouts, tokens, passes in ((3, 5, 1), (1, 0, 1), (1, 2, 2)):
            for _ in range(passes):
                one_pass(engine, 1, rollouts=rollouts, tokens=tokens)
            note(engine)
        one_pass(engine, 1, rollouts=1, tokens=1)
        engine.finish()
        note(engine)
        norms = [float(engine.get_global_grad_norm()), engine.last_step.grad_norm]
        engine.save_checkpoint(f"{folder}/{stage}")
        other = build(extended)
        other.load_checkpoint(f"{folder}/{stage}")
        loaded = [other.global_steps, other.global_samples, other.micro_steps, other.skipped_steps, other.get_lr()[0]]
        one_pass(other, 1, rollouts=3, tokens=5)
        note(other)
        results[stage] = {"clocks": clocks, "loaded": loaded, "norms": norms}
    return results


@on_two_ranks
def overflows(folder):
    """fp16 with a loss scale that is too high at first; DeepSpeed is made to believe that this CPU supports it."""
    accelerator = get_accelerator()
    supported = accelerator.is_fp16_supported
    accelerator.is_fp16_supported = lambda: True
    try:
        extended = _monitored(config(1, passes=4, loss_weight="token"), folder, "fp16")
        extended |= {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
        engine = build(extended)
        records, clocks = [], []
        for at in range(12):
            x = torch.ones(3, 4, dtype=torch.float16)
            # 3 tokens, then 1: every window is corrected, by 12 / 8.
            engine.backward(engine(x).float().pow(2).mean(), rollouts=1, tokens=1 if at % 2 else 3)
            engine.step()
            if at % 2:
                records.append(engine.last_step.model_dump())
                clocks.append([engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps])
    finally:
        accelerator.is_fp16_supported = supported
    return {"records": records, "clocks": clocks, "csv": _csv(f"{folder}/fp16")}


class TestCounters:
    def test_are_the_steps_the_rollouts_and_the_passes(self, two_ranks, stage):
        """Windows of one pass, empty, of two passes, and ended by finish(); then a fresh engine goes on."""
        clocks = two_ranks.of(counters)[stage]["clocks"]
        assert [clock[:4] for clock in clocks] == [
            [1, 6, 1, 0],
            [1, 8, 2, 0],
            [2, 12, 4, 0],
            [3, 14, 5, 0],
            [4, 20, 6, 0],
        ]
        assert [clock[6] for clock in clocks] == [1, 2, 3, 4, 5]

    def test_are_the_same_after_a_load(self, two_ranks, stage):
        result = two_ranks.of(counters)[stage]
        assert result["loaded"] == result["clocks"][3][:5]

    def test_lr_is_what_the_next_step_is_taken_with(self, two_ranks, stage):
        clocks = two_ranks.of(counters)[stage]["clocks"]
        for before, after in pairwise(clocks):
            assert before[4] == after[5]
        assert [clock[5] for clock in clocks] == pytest.approx([0.025, 0.025, 0.025, 0.0275, 0.03])

    def test_the_norm_is_the_last_steps(self, two_ranks, stage):
        norm, recorded = two_ranks.of(counters)[stage]["norms"]
        assert norm == recorded
        assert norm > 0

    def test_an_overflow_is_a_step_that_was_skipped_and_its_rollouts_count(self, two_ranks):
        result = two_ranks.of(overflows)
        assert result["clocks"] == [
            [1, 1, 4, 2],
            [2, 2, 8, 4],
            [3, 3, 12, 6],
            [4, 4, 16, 8],
            [5, 5, 20, 10],
            [6, 5, 24, 12],
        ]
        assert [record["skipped"] for record in result["records"]] == [True] * 5 + [False]


@on_two_ranks
def throughput(folder):
    """The timer over uneven windows, an empty one and one that finish() ends; what it says and what it measured."""
    extended = {**config(1, passes=4, loss_weight="token", overshoot="reset"), "steps_per_print": 1}
    engine = build(extended)
    timer, said, sizes = engine.tput_timer, [], []

    def listen(line):
        current = float(re.search(r"CurrSamplesPerSec=([\d.e+-]+)", line).group(1))
        average = float(re.search(r"RunningAvgSamplesPerSec=([\d.e+-]+)", line).group(1))
        said.append((current * timer.step_elapsed_time, average * timer.total_elapsed_time))

    timer.logging = listen
    early = timer.avg_samples_per_sec()
    plan = ((2, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 2), (1, 0, 2), (2, 1, 1), (1, 1, 1), (5, 1, 1))
    for at, (rollouts, tokens, passes) in enumerate(plan):
        for _ in range(passes):
            one_pass(engine, 1, rollouts=rollouts, tokens=tokens)
        if at == 6:
            engine.finish()
        sizes.append(engine.last_step.rollouts)
    rollouts = timer.avg_samples_per_sec() * timer.total_elapsed_time
    off = build({**extended, "timers": {"throughput": {"enabled": False}}})
    for _ in range(4):
        one_pass(off, 1, rollouts=2, tokens=1)
    return {
        "early": early,
        "sizes": sizes,
        "said": said,
        "rollouts": rollouts,
        "off": [off.tput_timer.total_elapsed_time, off.tput_timer.avg_samples_per_sec()],
    }


class TestThroughput:
    def test_is_rollouts_over_the_seconds_that_were_measured(self, two_ranks):
        """The timer starts after two steps; an empty window and one that finish() ends count with the next step."""
        result = two_ranks.of(throughput)
        assert result["sizes"] == [4, 4, 6, 4, 4, 4, 2, 10]
        assert result["rollouts"] == pytest.approx(6 + 4 + 4 + 4 + 2 + 10)
        said = [(6, 6), (4, 10), (4 + 4, 18), (2 + 10, 30)]
        assert result["said"] == [pytest.approx(line, rel=1e-2) for line in said]

    def test_is_unknown_before_it_was_measured_or_where_it_is_off(self, two_ranks):
        result = two_ranks.of(throughput)
        assert result["early"] == -math.inf
        assert result["off"] == [0, -math.inf]


def _monitored(extended, folder, job):
    section = {"enabled": True, "output_path": str(folder), "job_name": job}
    return {
        **extended,
        "csv_monitor": section,
        "tensorboard": {**section, "output_path": f"{folder}/tensorboard"},
    }


def _csv(folder):
    """Every csv file by its name: the header, and (x, value) of every line."""
    results = {}
    for path in sorted(Path(folder).glob("*.csv")):
        with path.open(newline="") as file:
            head, *lines = csv.reader(file)
        results[path.stem] = [head, *[[int(x), float(value)] for x, value in lines]]
    return results


def _tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@on_two_ranks
def monitors(folder):
    """Uneven windows, an empty one, metrics of which one comes late, and a last window settled by finish()."""
    results = {}
    rank = dist.get_rank()
    for stage in STAGES:
        where = f"{folder}/{stage}"
        engine = build(_monitored(config(stage, passes=4, loss_weight="token", overshoot="reset"), where, "job"))
        records, rates = [], []
        plan = ((3, 5, 1), (1, 2, 2), (2, 0, 1), (1, 3, 2), (1, 4, 1))
        for at, (rollouts, tokens, passes) in enumerate(plan):
            for index in range(passes):
                engine.record("reward/mean", torch.arange(at + rank, dtype=torch.float32))
                if at > 2 and rank:
                    engine.record("late", at / 3, 1)
                one_pass(engine, 10 * at + index + 5 * rank, rollouts=rollouts, tokens=tokens + rank * (tokens > 0))
            if at == 4:
                engine.finish()
            records.append(engine.last_step.model_dump())
            rates.append(engine.get_lr()[0])
        files = _csv(f"{where}/job") if rank == 0 else None
        board = _tensorboard(f"{where}/tensorboard/job") if rank == 0 else None
        results[stage] = {"records": records, "rates": rates, "csv": files, "tensorboard": board}
    return results


@on_two_ranks
def monitors_beside_bare(folder):
    """Uniform windows by ds_parity and by bare DeepSpeed, each with its own csv files."""
    engine = build(_monitored(config(2, passes=6), folder, "ds_parity"))
    for index in range(12):
        one_pass(engine, index)
    plain = {k: v for k, v in config(2).items() if k != "gradient_accumulation_passes"}
    model = perceptron()
    fixed = {"train_batch_size": 6, "gradient_accumulation_steps": 3}
    bare, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_monitored({**plain, **fixed}, folder, "bare")
    )
    for index in range(12):
        bare.backward(forward(bare, index))
        bare.step()
    return {"ds_parity": _csv(f"{folder}/ds_parity"), "bare": _csv(f"{folder}/bare")}


class TestMonitors:
    """Windows of 6, 4, 4, 4 and 2 rollouts; the third is empty, the last settled by finish()."""

    AT = (6, 10, 14, 18, 20)

    def events(self, records, key):
        return [[x, record[key]] for x, record in zip(self.AT, records, strict=True) if record[key] is not None]

    def test_csv_holds_every_step_once_over_rollouts(self, two_ranks, stage):
        result = two_ranks.of(monitors)[stage]
        files, records = result["csv"], result["records"]
        assert [record["rollouts"] for record in records] == [6, 4, 4, 4, 2]
        assert files["Train_Samples_train_loss"] == [["step", "train_loss"], *self.events(records, "loss")]
        assert len(files["Train_Samples_train_loss"]) == 1 + 4
        assert files["Train_Samples_rollouts"] == [["step", "rollouts"], *self.events(records, "rollouts")]
        assert files["Train_Samples_passes"] == [["step", "passes"], *self.events(records, "passes")]
        assert "Train_Samples_loss_scale" not in files

    def test_csv_holds_the_metrics_from_where_they_appear(self, two_ranks, stage):
        result = two_ranks.of(monitors)[stage]
        for name, head, first in (("reward/mean", "mean", 0), ("late", "late", 3)):
            lines = [[x, r["metrics"][name]] for x, r in zip(self.AT[first:], result["records"][first:], strict=True)]
            assert result["csv"][f"Train_Metrics_{name.replace('/', '_')}"] == [["step", head], *lines]

    def test_lr_is_deepspeeds_own_as_it_stands_once_so_many_rollouts_were_consumed(self, two_ranks, stage):
        result = two_ranks.of(monitors)[stage]
        stepped = [at for at, record in enumerate(result["records"]) if not record["skipped"]]
        lines = [[self.AT[at], result["rates"][at]] for at in stepped]
        assert result["csv"]["Train_Samples_lr"] == [["step", "lr"], *lines]
        for before, after in zip(result["rates"], result["records"][1:], strict=False):
            assert [before] == after["lr"]

    def test_tensorboard_holds_the_same_in_its_fp32(self, two_ranks, stage):
        result = two_ranks.of(monitors)[stage]
        board = result["tensorboard"]
        assert {tag.replace("/", "_") for tag in board} == set(result["csv"])
        for tag, events in board.items():
            lines = result["csv"][tag.replace("/", "_")][1:]
            assert [x for x, _ in events] == [x for x, _ in lines]
            assert [y for _, y in events] == pytest.approx([y for _, y in lines], rel=2**-23)

    def test_of_uniform_windows_hold_every_line_of_the_bare_engines_and_three_files_more(self, two_ranks):
        result = two_ranks.of(monitors_beside_bare)
        assert {name: result["ds_parity"][name] for name in result["bare"]} == result["bare"]
        more = {f"Train_Samples_{name}" for name in ("train_loss", "rollouts", "passes")}
        assert set(result["ds_parity"]) - set(result["bare"]) == more
        assert [x for x, _ in result["ds_parity"]["Train_Samples_train_loss"][1:]] == [6, 12, 18, 24]

    def test_the_loss_scale_is_the_scalers_own_and_not_the_one_that_corrects(self, two_ranks):
        result = two_ranks.of(overflows)
        scales = [record["loss_scale"] for record in result["records"]]
        assert scales == [2.0**23, 2.0**22, 2.0**21, 2.0**20, 2.0**19, 2.0**19]
        lines = [[4 * (at + 1), scale] for at, scale in enumerate(scales)]
        assert result["csv"]["Train_Samples_loss_scale"] == [["step", "loss_scale"], *lines]
