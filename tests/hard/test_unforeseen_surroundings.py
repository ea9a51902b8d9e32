"""What stands around a loop: monitors, profilers, compilers, global settings of torch, configurations given anyhow."""

import base64
import contextlib
import json
import logging
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running.half_precision import fp16_allowed
from tests.defaults import default_dtype
from tests.hard.unforeseen.cells import STAGES, Cell, Found, Watched, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import RATE, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

CALLER = {"boundary": "caller"}
WATCHING = {
    "csv": lambda f: {"csv_monitor": {"enabled": True, "output_path": f, "job_name": "job"}},
    "tensorboard": lambda f: {"tensorboard": {"enabled": True, "output_path": f, "job_name": "job"}},
    "clocks": lambda f: {"wall_clock_breakdown": True, "steps_per_print": 1},
    "flops": lambda f: {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{f}.flops"}},
    "comms": lambda f: {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True}, "dump_state": True},
}


def called(cell, section=None, **options):
    """An engine whose caller ends the windows, beside its oracle, whose `step()` ends one."""
    watched = Watched(cell, section={**CALLER, **(section or {})}, **options)
    watched.oracle._closes_at = 10**9
    return watched


def both_modes(watched, by_caller):
    for index in range(6):
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.noted(index)
        if not by_caller:
            watched.engine.step()
        elif index % 2:
            watched.engine.step()
            watched.oracle.step()
    return watched.found()


@play.right(STAGES, [f"{name}-{mode}" for name in WATCHING for mode in ("rollouts", "caller")])
def something_watches(case):
    name, mode = case.variant.split("-")
    Path(case.folder).mkdir(parents=True, exist_ok=True)
    make = called if mode == "caller" else Watched
    return both_modes(make(case.cell, **WATCHING[name](case.folder)), mode == "caller")


@contextlib.contextmanager
def strict():
    """Every warning is an error, but for those of what DeepSpeed calls itself: it calls what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _raised
        yield


def _raised(message, category, filename, lineno, *more):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"].partition(".")[0] in ("torch", "typing_extensions", "warnings"):
        frame = frame.f_back
    if not frame.f_globals["__name__"].startswith("deepspeed."):
        raise category(f"{frame.f_globals['__name__']}: {message}")


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


GLOBALS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "one-thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "warnings": strict,
    "deterministic": deterministic,
}


SET = [f"{name}-{mode}" for name in GLOBALS for mode in ("rollouts", "caller")]


@play.right(STAGES, SET)
def torch_is_set_otherwise(case):
    name, _, mode = case.variant.rpartition("-")
    watched = (called if mode == "caller" else Watched)(case.cell)
    samples = {index: watched.inputs(index) for index in range(6)}
    watched.inputs = lambda index, size=2: samples[index]
    quiet = warnings.catch_warnings()
    with quiet:
        if name == "anomaly":
            warnings.simplefilter("ignore")
        with GLOBALS[name]():
            for index in range(6):
                watched.engine.backward(watched.engine(*samples[index]), rollouts=2)
                if mode == "rollouts" or index % 2:
                    watched.engine.step()
    for index in range(6):
        watched.noted(index)
        if mode == "caller" and index % 2:
            watched.oracle.step()
    return watched.found()


@play.right(STAGES, ["rollouts", "caller"])
def the_engine_is_compiled(case):
    watched = (called if case.variant == "caller" else Watched)(case.cell)
    watched.engine.compile(backend="eager")
    return both_modes(watched, case.variant == "caller")


class Recomputed(Net):
    def predicted(self, x):
        hidden = deepspeed.checkpointing.checkpoint(lambda one: torch.tanh(self.body(one)), x.requires_grad_())
        return self.head(hidden).squeeze(-1)


@play.right(STAGES, ["rollouts", "caller"])
def deepspeed_recomputes(case):
    more = {"activation_checkpointing": {"partition_activations": False}}
    deepspeed.checkpointing.configure(None, deepspeed_config={"train_micro_batch_size_per_gpu": 1, **more})
    make = called if case.variant == "caller" else Watched
    return both_modes(make(case.cell, model=Recomputed(), right=Net(), **more), case.variant == "caller")


WAYS = ("path", "text", "args", "params", "base64")


@play.right([Cell(2)], WAYS)
def the_configuration_is_given_by(case):
    extended = config(case.cell, 4)
    path = Path(case.folder)
    path.mkdir(parents=True, exist_ok=True)
    path = path / f"own{dist.get_rank()}.json"
    path.write_text(json.dumps(extended))
    model, given = Net(), {}
    if case.variant == "path":
        given["config"] = path
    elif case.variant == "text":
        given["config"] = str(path)
    elif case.variant == "params":
        given["config_params"] = str(path)
    elif case.variant == "base64":
        given["config"] = base64.urlsafe_b64encode(json.dumps(extended).encode()).decode()
    else:
        given["args"] = Namespace(deepspeed_config=str(path), local_rank=dist.get_rank())
    engine = ds_parity.initialize(model=model, model_parameters=model.parameters(), **given)[0]
    return Found(0.0, [engine.window.target], [4])


@play.refused([Cell(2)], "ConfigError: initialize() got a configuration twice")
def two_configurations_contradict_each_other(case):
    path = Path(case.folder)
    path.mkdir(parents=True, exist_ok=True)
    path = path / f"own{dist.get_rank()}.json"
    path.write_text(json.dumps(config(case.cell, 4)))
    model = Net()
    args = Namespace(deepspeed_config=str(path), local_rank=dist.get_rank())
    engine = ds_parity.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=config(case.cell, 6)
    )[0]
    raise AssertionError(engine.window.target)


@play.right(STAGES)
def optimizer_and_schedule_are_made_by_functions(case):
    given = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100),
    }
    model = Net()
    given["model_parameters"] = list(model.parameters())
    by = lambda one: torch.optim.SGD(one.parameters(), lr=RATE, momentum=0.9)  # noqa: E731
    watched = Watched(case.cell, model=model, by=by, optimizer=False, given=given)
    watched.passes(range(8))
    return watched.found()


class Signs(torch.optim.Optimizer):
    """Steps by the gradient over the root of its running mean square, as Adafactor does of one dimension."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["square"] = 0.9 * state.get("square", torch.zeros_like(p)) + p.grad.square() + 1e-3
                p.data.add_(p.grad / state["square"].sqrt(), alpha=-group["lr"])


@play.right(STAGES, ["rollouts", "caller"])
def an_optimizer_of_the_users_own(case):
    model = Net()
    make = called if case.variant == "caller" else Watched
    by = lambda one: Signs(one.parameters())  # noqa: E731
    watched = make(case.cell, model=model, by=by, optimizer=False, given={"optimizer": Signs(model.parameters())})
    return both_modes(watched, case.variant == "caller")


@play.right([Cell(0), Cell(1), Cell(2), Cell(3)], ["sum", "mean"])
def divided_losses_of_uneven_ranks(case):
    """Rank 0 runs 3 backwards, rank 1 as many or, where it may, one; losses are divided by all, or by the rank's."""
    watched = called(case.cell, section={"loss_weight": "divided", "across_ranks": case.variant})
    own = [3, 1] if case.cell.stage < 2 else [3, 3]
    sizes = [[1, 2, 3], [2, 1, 1]]
    for window in range(3):
        samples = [[(10 * window + n, sizes[rank][n]) for n in range(own[rank])] for rank in range(2)]
        total = sum(size for rank in samples for _, size in rank)
        of_rank = [sum(size for _, size in rank) for rank in samples]
        for index, size in samples[watched.rank]:
            loss = watched.loss(index, size, "sum")
            loss = loss / (total if case.variant == "sum" else of_rank[watched.rank])
            watched.engine.backward(loss, rollouts=size)
        watched.engine.step()
        for rank, mine in enumerate(samples):
            for index, size in mine:
                x, y = (one.double() for one in sample(rank, index, size))
                divisor = total if case.variant == "sum" else 2 * of_rank[rank]
                watched.oracle.add_sum(lambda m, x=x, y=y, d=divisor: m(x, y, "sum") / d, units=0)
        watched.oracle._units, watched.oracle._rollouts = 1, total
        watched.oracle.step()
    return watched.found()


class Buffers(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x, y, reduction="mean"):
        self.seen += 1
        return super().forward(x, y, reduction) * self.phase.real.mean().to(x.dtype)


@play.right(STAGES)
def buffers_of_other_types(case):
    watched = Watched(case.cell, model=Buffers(), right=Net(), target=4)
    watched.passes(range(4))
    watched.engine.save_checkpoint(case.folder, "saved")
    other = Watched(case.cell, model=Buffers(), right=Net(), target=4)
    other.engine.load_checkpoint(case.folder, "saved")
    watched.engine = other.engine
    watched.passes(range(4, 8))
    return watched.found([int(watched.engine.module.seen)], [8])


@play.right(STAGES)
def engines_with_other_terms_take_turns(case):
    one = {"a": {"weight": "rollout"}, "b": {"weight": "token"}}
    other = {"c": {"weight": "pass", "coefficient": 2.0}}
    first = called(case.cell, section={"terms": one})
    second = called(case.cell, section={"terms": other}, model=Net(seed=3))
    for window in range(3):
        first.engine.expect(rollouts=4, tokens=6)
        for index in range(2):
            loss = first.loss(10 * window + index)
            first.engine.backward({"a": loss, "b": loss}, rollouts=2, tokens=3)
            second.engine.backward({"c": second.loss(10 * window + index)}, rollouts=2)
            first.noted(10 * window + index, factor=2.0)
            second.noted(10 * window + index, factor=2.0)
            if index:
                second.engine.step()
                second.oracle.step()
        first.engine.step()
        first.oracle.step()
    apart = second.found().apart
    found = first.found()
    return Found(max(apart, found.apart), found.got, found.right)


class Said(logging.Handler):
    """Keeps what ds_parity warns of."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@play.right(STAGES, ["frozen", "without-rate"])
def a_frozen_parameter_has_a_momentum(case):
    """It stands still on ZeRO 0, and elsewhere by its group's rate of 0; a warning says that it moves otherwise."""

    def by(model):
        groups = [{"params": list(one.parameters())} for one in (model.body, model.head)]
        return torch.optim.SGD(groups, lr=RATE, momentum=0.9, weight_decay=0.1)

    model, said = Net(), Said()
    watched = Watched(case.cell, model=model, by=by, optimizer=False, given={"optimizer": by(model)})
    watched.passes(range(4))  # whole windows
    for one in (watched.engine.module, watched.oracle.model):
        one.head.requires_grad_(False)
    if case.variant == "without-rate":
        watched.engine.optimizer.param_groups[1]["lr"] = 0.0
    before = weights_of(watched.engine)["head.weight"]
    logging.getLogger("ds_parity").addHandler(said)
    watched.passes(range(4, 8))
    logging.getLogger("ds_parity").removeHandler(said)
    moved = (weights_of(watched.engine)["head.weight"] - before).abs().max() > 0
    warned = any("frozen after the engine was built" in line for line in said.lines)
    elsewhere = case.cell.stage > 0
    return Found(0.0, [bool(moved), warned], [elsewhere and case.variant == "frozen", elsewhere])


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def predicted(self, x):
        return super().predicted(self.norm(x))


IDLE = [f"{skip}-{mode}" for skip in ("skip", "all") for mode in ("train", "eval")]


@play.right(STAGES, IDLE)
def idle_passes_run_a_forward(case):
    """A batch norm counts it, unless the loop puts it into eval(): rank 1 runs out of data behind 2 micro-batches."""
    skip, mode = case.variant.split("-")
    watched = Watched(case.cell, model=Normed())
    norm = watched.engine.module.norm
    stream = [ds_parity.MicroBatch({"index": i}, rollouts=2) for i in range(2 if watched.rank else 6)]
    for batch in watched.engine.passes(stream, skip_idle=skip == "skip"):
        norm.train(mode == "train" or not batch.idle)
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    # Of a window of four passes, ZeRO 0 and 1 skip those between the first and the last.
    idle = 2 if skip == "skip" and case.cell.stage < 2 else 4
    counted = 6 if watched.rank == 0 else 2 + (idle if mode == "train" else 0)
    return Found(0.0, [int(norm.num_batches_tracked)], [counted])


class Shared(torch.nn.SyncBatchNorm):
    """On a CPU, where torch has none: the samples of this rank alone."""

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


class Synchronised(Net):
    """Has statistics of all ranks."""

    def __init__(self):
        super().__init__()
        self.norm = Shared(6)

    def predicted(self, x):
        return super().predicted(self.norm(x))


@play.refused(STAGES, dict.fromkeys(("rollouts", "caller"), "WindowError: an idle pass with torch's SyncBatchNorm"))
def an_idle_rank_shares_its_statistics(case):
    """What it runs would change the losses of the other rank."""
    watched = (called if case.variant == "caller" else Watched)(case.cell, model=Synchronised())
    with warnings.catch_warnings():
        watched.engine.backward(watched.loss(0), rollouts=2)
        if case.variant == "rollouts":
            watched.engine.step()
        watched.engine.idle(watched.loss(1))


def _none():
    yield ds_parity.MicroBatch({"index": 0}, rollouts=2)
    yield None


def _dictionary():
    yield ds_parity.MicroBatch({"index": 0}, rollouts=2)
    yield {"rollouts": 2}


def _negative():
    yield ds_parity.MicroBatch({"index": 0}, rollouts=2)
    yield ds_parity.MicroBatch({"index": 1}, rollouts=-1)


STREAMS = {"none": _none, "dict": _dictionary, "negative": _negative}


@play.refused([Cell(0)], {f"{n}-{k}": ("RankDesyncError: ", "WindowError: ") for n in STREAMS for k in "02w"})
def a_stream_of_one_rank_yields(case):
    """On ZeRO 3 the other rank may wait in its forward, which closes connections that later cases need."""
    name, ahead = case.variant.split("-")
    watched = Watched(case.cell, section={"exchange_timeout": 8.0})
    stream = STREAMS[name]() if watched.rank else [ds_parity.MicroBatch({"index": i}, rollouts=2) for i in range(4)]
    for batch in watched.engine.passes(stream, lookahead="window" if ahead == "w" else int(ahead)):
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()


@play.right(STAGES, ["0", "1", "3"])
def totals_are_said_inside_passes(case):
    terms = {"a": {"weight": "rollout"}, "b": {"weight": "token"}}
    watched = Watched(case.cell, section={"terms": terms})
    stream = [ds_parity.MicroBatch({"index": i}, rollouts=2, tokens=3) for i in range(6)]
    for batch in watched.engine.passes(stream, lookahead=int(case.variant)):
        if watched.engine.window.passes == 0:
            watched.engine.expect(rollouts=4, tokens=6)
        loss = watched.loss(batch.inputs["index"])
        watched.engine.backward({"a": loss, "b": loss})
        watched.engine.step()
        watched.noted(batch.inputs["index"], factor=2.0)
    return watched.found()


@play.right(STAGES)
def whole_windows_are_left_and_gone_on_with(case):
    """Twice behind a boundary and once inside a window, with an evaluation and a checkpoint there."""
    terms = {"a": {"weight": "rollout"}, "b": {"weight": "rollout", "coefficient": 0.5}}
    watched = Watched(case.cell, section={"terms": terms, "lookahead": "window"})
    ran = []

    def run(indices, leave):
        stream = [ds_parity.MicroBatch({"index": i}, rollouts=2) for i in indices]
        for number, batch in enumerate(watched.engine.passes(stream, finish=False), 1):
            index = batch.inputs["index"]
            loss = watched.loss(index)
            # In bare DeepSpeed, too, ZeRO 3 keeps what it gathers in inference mode, and the backward raises.
            with torch.no_grad() if case.cell.stage == 3 else torch.inference_mode():
                watched.loss(60)
            watched.engine.backward({"a": loss, "b": loss})
            watched.engine.step()
            watched.noted(index, factor=1.5)
            ran.append(index)
            if watched.engine.window.passes == 0:
                watched.engine.save_checkpoint(case.folder, f"at{index}")
            if number == leave:
                break

    run(range(6), 2)
    run(range(10, 16), 3)
    run(range(20, 23), 99)
    return watched.found([ran], [[0, 1, 10, 11, 12, 20, 21, 22]])


@play.right(STAGES, ["goes-on", "resumes"])
def overflows_in_windows_of_the_caller(case):
    """fp16, a loss scale that is too high at first, and a resume behind the second overflow: the same bits."""
    with fp16_allowed():
        scale = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1}

        def built():
            extended = config(case.cell, section=CALLER, fp16=scale)
            return engine_of(extended, Net())

        def run(engine, windows):
            scales = []
            for window in windows:
                for index in range(1 + window % 3):
                    x, y = sample(dist.get_rank(), 10 * window + index, 2)
                    engine.backward(engine(x.half(), y.half()).float(), rollouts=2)
                engine.step()
                scales.append([engine.last_step.loss_scale, engine.last_step.skipped])
            return scales

        whole = built()
        right = run(whole, range(10))
        engine = built()
        got = run(engine, range(4))
        engine.save_checkpoint(case.folder, "saved")
        if case.variant == "resumes":
            engine = built()
        engine.load_checkpoint(case.folder, "saved")
        got += run(engine, range(4, 10))
        assert any(skipped for _, skipped in right), right
        assert not all(skipped for _, skipped in right), right
        return Found(distance(weights_of(engine), weights_of(whole)), [got], [right])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
