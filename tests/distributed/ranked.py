"""Small things that two ranks do, each in a few lines; what they return is asserted in test_engine.py."""

import io
import json
import logging
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config

TASKS = [
    "late_close",
    "proxy_methods",
    "overlapped_finish",
    "boundaries",
    "bare_without_the_key",
    "unchanged_loop",
    "configuration_by_arguments",
    "all_idle",
    "idle_nan",
    "empty_window",
    "drop",
    "last_window_error",
    "misuse",
    "desync",
    "silence_of_a_rank",
    "overhead",
    "torch_schedulers",
    "trace_key",
]


def build(extended, **keywords):
    """An engine over a small perceptron, the same on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended, **keywords)
    return engine


def forward(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, generator=generator).to(get_accelerator().current_device_name())
    return engine(x).pow(2).mean()


def one_pass(engine, seed, **counts):
    loss = engine.backward(forward(engine, seed), **counts)
    engine.step()
    return loss


def refusal(call):
    """The error that `call` ends in, as text."""
    try:
        call()
    except ds_parity.DsParityError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def boundaries(folder):
    """Windows of 4 passes on each stage: where the boundary is, what LR every pass sees, what moved."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, passes=8))
        foretold, seen, rates, clocks = [], [], [], []
        for index in range(12):
            foretold.append(engine.is_gradient_accumulation_boundary())
            rates.append(engine.get_lr()[0])
            engine.backward(forward(engine, index))
            seen.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            clocks.append((engine.global_steps, engine.lr_scheduler.last_batch_iteration, engine.global_samples))
        found[stage] = {"foretold": foretold, "seen": seen, "rates": rates, "clocks": clocks}
    return found


def bare_without_the_key(folder):
    plain = {**config(2), "train_batch_size": 2}
    del plain["gradient_accumulation_passes"]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    returned = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=plain)
    return {"bare": type(returned[0]) is deepspeed.DeepSpeedEngine, "length": len(returned)}


def unchanged_loop(folder):
    """DeepSpeed's own loop, arguments, data loader and callables, with nothing of ours in it."""
    from argparse import Namespace

    data = [(torch.full((4,), float(i)), torch.tensor(1.0)) for i in range(16)]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine, optimizer, loader, scheduler = ds_parity.initialize(
        args=Namespace(local_rank=dist.get_rank(), deepspeed_config=None),
        model=model,
        model_parameters=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        training_data=data,
        config={k: v for k, v in config(2, passes=4).items() if k not in ("optimizer", "scheduler")},
    )
    boundaries = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x).squeeze(-1), y)
        engine.backward(loss)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    return {
        "isinstance": isinstance(engine, deepspeed.DeepSpeedEngine),
        "boundaries": boundaries,
        "lr": scheduler.get_last_lr(),
        "steps": engine.global_steps,
        "optimizer": optimizer is engine.optimizer,
    }


def configuration_by_arguments(folder):
    """`--deepspeed_config FILE`, as deepspeed.add_config_arguments gives it."""
    from argparse import Namespace

    path = Path(f"{folder}-{dist.get_rank()}.json")
    path.write_text(json.dumps(config(1, passes=4)))
    given = Namespace(local_rank=dist.get_rank(), deepspeed_config=str(path))
    model = torch.nn.Linear(4, 1)
    engine, *_ = ds_parity.initialize(args=given, model=model, model_parameters=model.parameters())
    return {"target": engine.window.target, "args": given.deepspeed_config == str(path)}


def all_idle(folder):
    """A window in which no rank has a rollout, at the end of the data."""
    said, handler = _listen()
    engine = build(config(1, passes=4))
    before = weights.vector(engine.module)
    for seed in range(2):
        engine.idle(forward(engine, seed))
        engine.step()
    engine.finish()
    logging.getLogger("ds_parity").removeHandler(handler)
    unmoved = torch.equal(before, weights.vector(engine.module))
    return {"said": said.getvalue(), "unmoved": unmoved, "record": engine.last_step.model_dump()}


def idle_nan(folder):
    """The same window with and without an idle pass whose forward gives NaN and inf."""
    found = {}
    for stage in STAGES:
        reached = []
        for bad in (None, float("nan"), float("inf")):
            engine = build(config(stage, passes=4))
            one_pass(engine, 1, rollouts=1)
            if bad is not None:
                returned = engine.idle(forward(engine, 2) * bad)
                engine.step()
            one_pass(engine, 3, rollouts=1)
            reached.append(weights.vector(engine.module))
        record = engine.last_step
        found[stage] = {
            "equal": [torch.equal(reached[0], other) for other in reached[1:]],
            "finite": bool(torch.isfinite(reached[1]).all()),
            "returned": float(returned),
            "idle_passes": record.idle_passes,
            "loss": record.loss,
        }
    return found


def empty_window(folder):
    """A window without loss tokens between two good ones; the schedule, and what is said."""
    found = {}
    for stage in STAGES:
        said, handler = _listen()
        engine = build(config(stage, passes=4, loss_weight="token"))
        before = weights.vector(engine.module)
        rates = [engine.get_lr()]
        for _ in range(2):
            one_pass(engine, 1, rollouts=1, tokens=0)
        skipped = engine.last_step
        unmoved = torch.equal(before, weights.vector(engine.module))
        rates.append(engine.get_lr())
        for _ in range(2):
            one_pass(engine, 2, rollouts=1, tokens=5)
        only = build(config(stage, passes=4, loss_weight="token"))
        for _ in range(2):
            one_pass(only, 2, rollouts=1, tokens=5)
        logging.getLogger("ds_parity").removeHandler(handler)
        found[stage] = {
            "skipped": skipped.model_dump(),
            "unmoved": unmoved,
            "rates": rates,
            "said": said.getvalue(),
            "next": engine.last_step.model_dump(),
            "steps": engine.global_steps,
            "samples": engine.global_samples,
            "as_if_it_never_was": torch.equal(weights.vector(engine.module), weights.vector(only.module)),
        }
    return found


def drop(folder):
    """An open window at the end of the data, dropped; the next window holds nothing of it."""
    found = {}
    for stage in STAGES:
        said, handler = _listen()
        engine = build(config(stage, passes=4, last_window="drop"))
        before = weights.vector(engine.module)
        one_pass(engine, 1)
        engine.finish()
        unmoved = torch.equal(before, weights.vector(engine.module))
        for seed in (2, 3):
            one_pass(engine, seed)
        fresh = build(config(stage, passes=4))
        for seed in (2, 3):
            one_pass(fresh, seed)
        logging.getLogger("ds_parity").removeHandler(handler)
        same = torch.equal(weights.vector(engine.module), weights.vector(fresh.module))
        found[stage] = {"unmoved": unmoved, "same": same, "said": said.getvalue(), "steps": engine.global_steps}
    return found


def last_window_error(folder):
    engine = build(config(2, passes=4, last_window="error"))
    one_pass(engine, 1)
    message = refusal(engine.finish)
    fine = build(config(2, passes=4, last_window="error"))
    for seed in (1, 2):
        one_pass(fine, seed)
    return {"open": message, "closed": refusal(fine.finish)}


def misuse(folder):
    """What each wrong call is answered with."""
    engine = build(config(1, passes=8))
    found = {
        "negative": refusal(lambda: engine.backward(forward(engine, 0), rollouts=-1)),
        "nan": refusal(lambda: engine.backward(forward(engine, 0), rollouts=float("nan"))),
        "bool": refusal(lambda: engine.backward(forward(engine, 0), rollouts=True)),
        "scale": refusal(lambda: engine.backward(forward(engine, 0), scale_wrt_gas=False)),
        "step first": refusal(engine.step),
        "boundary": refusal(lambda: engine.set_gradient_accumulation_boundary(True)),
        "batch": refusal(lambda: engine.set_train_batch_size(4)),
        "micro": refusal(lambda: engine.set_train_micro_batch_size(4)),
        "coalesce": refusal(engine.coalesce_grad_reduction),
    }
    one_pass(engine, 1, rollouts=2)
    found["foretell"] = refusal(engine.is_gradient_accumulation_boundary)
    found["save"] = refusal(lambda: engine.save_checkpoint(folder))
    found["tuple"] = refusal(lambda: engine.backward((forward(engine, 1), 0), rollouts=2))
    engine.backward(forward(engine, 1), rollouts=2)
    found["twice"] = refusal(lambda: engine.backward(forward(engine, 1), rollouts=2))
    found["finish"] = refusal(engine.finish)
    by_token = build(config(1, loss_weight="token"))
    found["no tokens"] = refusal(lambda: by_token.backward(forward(by_token, 0)))
    found["rollouts only"] = refusal(lambda: by_token.backward(forward(by_token, 0), rollouts=1))
    by_prompt = build(config(1, count="prompt"))
    found["no prompts"] = refusal(lambda: by_prompt.backward(forward(by_prompt, 0)))
    found["prompts left out"] = refusal(lambda: by_prompt.backward(forward(by_prompt, 0), rollouts=4))
    exact = build(config(1, passes=3, overshoot="error"))
    found["overshoot"] = refusal(lambda: exact.backward(forward(exact, 0), rollouts=2))
    dry = build(config(1))
    found["stuck"] = refusal(lambda: list(dry.passes([] if dist.get_rank() else [_Batch()], lookahead=3)))
    skipping = build(config(1, passes=20))
    batches = skipping.passes([_Batch() for _ in range(3)], finish=False)
    next(batches)
    found["no backward"] = refusal(lambda: next(batches))
    doubled = build(config(1, passes=20))
    unstepped = build(config(1, passes=20))
    for _ in unstepped.passes([_Batch() for _ in range(4)], lookahead=4, finish=False):
        unstepped.backward(forward(unstepped, 1))
        found["no step in passes"] = refusal(lambda: unstepped.backward(forward(unstepped, 1)))
        break
    for _ in doubled.passes([_Batch()], finish=False):
        one_pass(doubled, 1)
        found["two backwards"] = refusal(lambda: doubled.backward(forward(doubled, 1)))
        found["foretell in passes"] = refusal(doubled.is_gradient_accumulation_boundary)
    synced = build(config(1, passes=2))
    with synced.no_sync():
        found["no_sync"] = refusal(lambda: synced.backward(forward(synced, 0)))
    by_rollout = {k: v for k, v in config(1, lr_progress="rollout").items() if k != "scheduler"}
    found["plateau"] = refusal(lambda: build(by_rollout, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau))
    return found


class _Batch:
    rollouts, prompts, tokens = 1, 0, 3


def desync(folder):
    """Ranks in different places: every rank is told, at once."""
    rank = dist.get_rank()
    engine = build(config(1, passes=8))
    one_pass(engine, 1)
    pass_count = refusal(engine.finish if rank else lambda: one_pass(engine, 2))
    settings = refusal(lambda: build(config(1, passes=8, overshoot="reset" if rank else "carry")))
    stage = refusal(lambda: build(config(1 + rank, passes=8)))
    fault = refusal(lambda: build(config(1, passes=8, overshoot="cary" if rank else "carry")))
    trace = refusal(lambda: build(config(1, passes=8, trace="/dev/null/trace")))
    places = {"steps_per_print": 10 + rank, "csv_monitor": {"enabled": False, "output_path": f"{folder}/{rank}"}}
    own = refusal(lambda: build({**config(1, passes=8, trace=f"{folder}/{rank}.jsonl"), **places}))
    ahead = build(config(1, passes=8))
    lookahead = refusal(lambda: next(iter(ahead.passes([_Batch()], lookahead=2 + rank))))
    found = {"pass count": pass_count, "settings": settings, "stage": stage, "fault": fault, "trace": trace}
    return _from_all({**found, "own": own, "lookahead": lookahead, **_alone()})


def _alone():
    """Rank 1 refuses, or its stream breaks, where the others have a pass; all go on with another engine after it."""
    found = {}
    for stage, ahead in ((1, 0), (2, 0), (3, 3)):
        for name, stream in (("refuses", _refused), ("breaks", _broken)):
            engine = build(config(stage, passes=8, lookahead=ahead, exchange_timeout=60))
            begun = time.perf_counter()
            message = refusal(lambda: [one_pass(engine, 1) for _ in engine.passes(stream())])  # noqa: B023  # called here
            found[f"{name}, ZeRO {stage}"] = [message, time.perf_counter() - begun]
    return found


def _refused():
    yield _Batch()
    parts = _Batch()
    parts.rollouts = 1 - dist.get_rank()
    yield parts
    yield _Batch()


def _broken():
    yield _Batch()
    if dist.get_rank():
        raise ds_parity.TraceError("the stream broke")
    yield _Batch()


def silence_of_a_rank(folder):
    """One rank never comes: the others are told when the time is up."""
    engine = build(config(1, passes=8, exchange_timeout=2.5))
    begun = time.perf_counter()
    message = refusal(lambda: one_pass(engine, 1)) if dist.get_rank() == 0 else "silent"
    seconds = time.perf_counter() - begun
    dist.barrier()
    return {"message": message, "seconds": seconds}


def overhead(folder):
    """Collectives and reads of device tensors in a window of 6 passes, ours beside the bare engine."""
    found = {}
    for stage in STAGES:
        engine = build(config(stage, passes=12))
        exchange = engine._self_driver.exchange
        for index in range(6):
            one_pass(engine, index)
        with _Counting() as ours:
            before = exchange.collectives
            for index in range(6):
                one_pass(engine, index)
        bare = engine.__wrapped__
        with _Counting() as theirs:
            for index in range(6):
                bare.set_gradient_accumulation_boundary(index == 5)
                bare.backward(forward(bare, index) / 6, scale_wrt_gas=False)
                bare.step()
        ahead = build(config(stage, passes=12, lookahead=6))
        for _ in ahead.passes([_Batch() for _ in range(6)]):
            one_pass(ahead, 1)
        found[stage] = {
            "exchanges": exchange.collectives - before,
            "ours": ours.counts,
            "bare": theirs.counts,
            "ahead": ahead._self_driver.exchange.collectives,
        }
    return found


class _Counting:
    """Counts reads of tensors and collectives in this process; each call goes through as it was."""

    READS = ("item", "__bool__", "__float__", "__int__")
    COLLECTIVES = (
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "barrier",
        "isend",
        "recv",
    )

    def __enter__(self):
        self._kept = [(torch.Tensor, name, getattr(torch.Tensor, name)) for name in self.READS]
        self._kept += [(dist, name, getattr(dist, name)) for name in self.COLLECTIVES]
        self.counts = {name: 0 for _, name, _ in self._kept}
        for owner, name, kept in self._kept:
            setattr(owner, name, self._counted(name, kept))
        return self

    def _counted(self, name, kept):
        def counted(*args, **kwargs):
            self.counts[name] += 1
            return kept(*args, **kwargs)

        return counted

    def __exit__(self, *error):
        for owner, name, kept in self._kept:
            setattr(owner, name, kept)


def torch_schedulers(folder):
    """Nominal progress under uneven windows: fractional for LambdaLR, whole steps for the others, DeepSpeed's own."""
    kinds = {
        "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step),
        "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    }
    found = {}
    for name, kind in kinds.items():
        extended = {k: v for k, v in config(2, passes=4, lr_progress="rollout").items() if k != "scheduler"}
        engine = build(extended, lr_scheduler=kind)
        rates = []
        for held in (3, 3, 3, 1):
            one_pass(engine, 1, rollouts=held)
            rates.append(engine.get_lr()[0] / 0.05)
        found[name] = rates
    extended = config(2, passes=4, lr_progress="rollout")
    engine = build(extended)
    for held in (3, 3, 3, 1):
        one_pass(engine, 1, rollouts=held)
    found["deepspeed"] = engine.lr_scheduler.last_batch_iteration
    return found


def late_close(folder):
    """A generator that was left and is closed while a newer one runs."""
    engine = build(config(1, passes=20))
    left = engine.passes([_Batch() for _ in range(4)], finish=False)
    next(left)
    one_pass(engine, 1)
    taken = 0
    for _ in engine.passes([_Batch() for _ in range(3)], finish=False):
        left.close()
        one_pass(engine, 1)
        taken += 1
    return {"taken": taken, "passes": engine.window.passes}


def proxy_methods(folder):
    engine = build(config(1, passes=4))
    kept = [engine.to(engine.device), engine.apply(lambda module: None), engine.requires_grad_(True)]
    return {"kept": [returned is engine for returned in kept], "weights": engine.module is engine.__wrapped__.module}


def overlapped_finish(folder):
    """An open window at the end under overlap_comm, beside the same window closed by its last backward."""
    found = {}
    for stage in (1, 2, 3):
        reached = []
        for passes in (20, 4):
            extended = config(stage, passes=passes)
            extended["zero_optimization"]["overlap_comm"] = True
            engine = build(extended)
            torch.manual_seed(dist.get_rank())
            for seed in range(2):
                one_pass(engine, 10 * dist.get_rank() + seed)
            if passes == 20:
                engine.finish()
            reached.append((weights.vector(engine.module), float(engine.get_global_grad_norm())))
        found[stage] = {
            "difference": float((reached[0][0] - reached[1][0]).abs().max()),
            "norms": [norm for _, norm in reached],
        }
    return found


def trace_key(folder):
    path = f"{folder}/training.jsonl"
    engine = build(config(2, passes=4, trace=path))
    for index in range(4):
        one_pass(engine, index)
    last = engine.last_step.model_dump()
    return {"path": path, "last": last}


def _from_all(value):
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def _listen():
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("ds_parity").addHandler(handler)
    return said, handler
