"""Metrics, counters and monitors on two ranks; what the tasks return is asserted in test_metrics.py."""

import csv
import re
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.distributed.cells import STAGES, config
from tests.distributed.ranked import _Counting, _from_all, build, forward, one_pass

TASKS = [
    "recorded",
    "metric_collectives",
    "windows_without_a_step",
    "stand_ins",
    "thrown_away",
    "counters",
    "throughput",
    "monitors",
    "monitors_beside_bare",
    "overflows",
]
PATHS = ("host", "device")


def over(engine, path):
    """Sum on the host, or as an accelerator does; both run on the same tensors here."""
    engine._self_driver.meter._on_device = path == "device"
    return engine


def samples(window, index, rank):
    """What a rank records in a pass: name to (values, weights), other numbers of samples everywhere."""
    generator = torch.Generator().manual_seed(100 * window + 10 * index + rank)
    held = (window + 2 * index + 3 * rank) % 5
    values = torch.randn(held, generator=generator)
    found = {}
    if (window, rank) != (2, 1):
        found["reward"] = (values, None)
        found["kl"] = (values * 2, torch.randint(0, 9, (held,), generator=generator))
    if rank == 0:
        found["entropy"] = (float(values.sum()), held)
    if rank == 1 and window >= 2:
        found["a late one"] = (values + 1, None)
    return found


def recorded(folder):
    """Five windows of three passes, some of them with uneven rollouts; the third is one in which a rank is silent."""
    rank, found = dist.get_rank(), {}
    for stage in STAGES:
        for path in PATHS:
            engine = over(build(config(stage, passes=3 * dist.get_world_size())), path)
            metrics = []
            for window in range(5):
                for index in range(3):
                    loss = forward(engine, index)
                    given = samples(window, index, rank)
                    for name, (values, weights) in given.items():
                        engine.record(name, values, weights)
                    engine.backward(loss, rollouts=1)
                    engine.step()
                metrics.append(engine.last_step.metrics)
            found[f"{stage} {path}"] = _from_all(metrics)
    return found


class _More(_Counting):
    COLLECTIVES = (*_Counting.COLLECTIVES, "all_gather_object")


def metric_collectives(folder):
    """What a window of 3 passes sends: without metrics, with known ones, with a new one on one rank."""
    found = {}
    for path in PATHS:
        engine = over(build(config(1, passes=6)), path)

        def window(names, engine=engine):
            with _More() as counted:
                for index in range(3):
                    loss = forward(engine, index)
                    for name in names:
                        engine.record(name, loss, 2.0)
                        engine.record(name, torch.ones(4))
                    engine.backward(loss, rollouts=1)
                    engine.step()
            return counted.counts

        known = ["a", "b", "c"]
        window([])
        found[path] = {
            "none": window([]),
            "first": window(known),
            "known": window(known),
            "new": window([*known, "d"] if dist.get_rank() else known),
            "silent": window(known if dist.get_rank() else []),
            "names": sorted(engine.last_step.metrics),
        }
    return found


def windows_without_a_step(folder):
    """An empty window and a dropped one hold their metrics, and leave none to the next."""
    found = {}
    for path in PATHS:
        rank = dist.get_rank()
        engine = over(build(config(2, passes=4, loss_weight="token", last_window="drop")), path)
        records = []
        for tokens, passes in ((0, 2), (3, 2), (3, 1)):
            for _ in range(passes):
                engine.record(f"tokens {tokens}", float(rank), 1 + rank)
                one_pass(engine, 1, rollouts=1, tokens=tokens)
            if passes == 1:
                engine.finish()
            records.append(engine.last_step.model_dump())
        for _ in range(2):
            one_pass(engine, 1, rollouts=1, tokens=3)
        records.append(engine.last_step.model_dump())
        found[path] = records
    return found


class _Batch:
    prompts, tokens = 0, 3

    def __init__(self, rollouts):
        self.rollouts = rollouts


def stand_ins(folder):
    """A stream that runs dry on rank 1 after one micro-batch; its loop records in every pass."""
    found = {}
    for lookahead in (0, 3):
        engine = build(config(2, passes=12))
        stream = [_Batch(2)] * (1 if dist.get_rank() else 3)
        for index, batch in enumerate(engine.passes(stream, lookahead=lookahead)):
            engine.record("before", float(10**index), batch.rollouts)
            engine.backward(forward(engine, 1))
            engine.record("after", torch.full((2,), float(10**index)))
            engine.step()
        found[str(lookahead)] = engine.last_step.model_dump()
    return found


def thrown_away(folder):
    """Loading throws an open window's metrics away, also those that came before its first pass; names stay agreed on."""
    found = {}
    for path in PATHS:
        engine = over(build(config(1, passes=4)), path)
        agreed = []
        for _ in range(2):
            engine.record("known", 1.0)
            one_pass(engine, 1, rollouts=1)
        engine.save_checkpoint(f"{folder}/{path}")
        agreed.append(engine._self_driver.meter._agreed)
        for passes in (1, 0):
            if dist.get_rank():
                engine.record("only here", 5.0)
            engine.record("known", 5.0)
            for _ in range(passes):
                one_pass(engine, 1, rollouts=1)
            engine.load_checkpoint(f"{folder}/{path}")
        agreed.append(engine._self_driver.meter._agreed)
        for _ in range(2):
            engine.record("known", 2.0)
            one_pass(engine, 1, rollouts=1)
        found[path] = {"agreed": _from_all(agreed), "metrics": engine.last_step.metrics}
    return found


def counters(folder):
    """Uneven windows, an empty one, one ended by finish(), and a load into a fresh engine."""
    found = {}
    for stage in STAGES:
        extended = config(stage, passes=4, loss_weight="token")
        engine = build(extended)
        clocks = []

        def note(engine, clocks=clocks):
            held = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
            clocks.append([*held, engine.get_lr()[0], engine.last_step.lr[0], engine.last_step.step])

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
        found[stage] = {"clocks": clocks, "loaded": loaded, "norms": norms}
    return found


def throughput(folder):
    """The timer over uneven windows, an empty one and one that finish() ends; what it says and what it measured."""
    extended = {**config(1, passes=4, loss_weight="token", overshoot="reset"), "steps_per_print": 1}
    engine = build(extended)
    timer, said, held = engine.tput_timer, [], []

    def listen(line):
        told = float(re.search(r"CurrSamplesPerSec=([\d.e+-]+)", line).group(1))
        average = float(re.search(r"RunningAvgSamplesPerSec=([\d.e+-]+)", line).group(1))
        said.append((told * timer.step_elapsed_time, average * timer.total_elapsed_time))

    timer.logging = listen
    early = timer.avg_samples_per_sec()
    plan = ((2, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 2), (1, 0, 2), (2, 1, 1), (1, 1, 1), (5, 1, 1))
    for at, (rollouts, tokens, passes) in enumerate(plan):
        for _ in range(passes):
            one_pass(engine, 1, rollouts=rollouts, tokens=tokens)
        if at == 6:
            engine.finish()
        held.append(engine.last_step.rollouts)
    rollouts = timer.avg_samples_per_sec() * timer.total_elapsed_time
    off = build({**extended, "timers": {"throughput": {"enabled": False}}})
    for _ in range(4):
        one_pass(off, 1, rollouts=2, tokens=1)
    return {
        "early": early,
        "held": held,
        "said": said,
        "rollouts": rollouts,
        "off": [off.tput_timer.total_elapsed_time, off.tput_timer.avg_samples_per_sec()],
    }


def _monitored(extended, folder, job):
    section = {"enabled": True, "output_path": str(folder), "job_name": job}
    return {
        **extended,
        "csv_monitor": section,
        "tensorboard": {**section, "output_path": f"{folder}/tensorboard"},
    }


def _csv(folder):
    """Every csv file by its name: the header, and (x, value) of every line."""
    found = {}
    for path in sorted(Path(folder).glob("*.csv")):
        with path.open(newline="") as file:
            head, *lines = csv.reader(file)
        found[path.stem] = [head, *[[int(x), float(value)] for x, value in lines]]
    return found


def _tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def monitors(folder):
    """Uneven windows, an empty one, metrics of which one comes late, and a last window settled by finish()."""
    found = {}
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
        found[stage] = {"records": records, "rates": rates, "csv": files, "tensorboard": board}
    return found


def monitors_beside_bare(folder):
    """Uniform windows, ours and bare DeepSpeed's, each with its own csv files."""
    ours = build(_monitored(config(2, passes=6), folder, "ours"))
    for index in range(12):
        one_pass(ours, index)
    plain = {k: v for k, v in config(2).items() if k != "gradient_accumulation_passes"}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    fixed = {"train_batch_size": 6, "gradient_accumulation_steps": 3}
    bare, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_monitored({**plain, **fixed}, folder, "bare")
    )
    for index in range(12):
        bare.backward(forward(bare, index))
        bare.step()
    return {"ours": _csv(f"{folder}/ours"), "bare": _csv(f"{folder}/bare")}


def overflows(folder):
    """fp16 with a loss scale that is too high at first; DeepSpeed's question whether this CPU is made for it is answered."""
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
