"""Small engines that ranks train in a few lines, and what tests read of ds_parity's insides, each in one place."""

import io
import logging
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity


@dataclass
class Batch:
    """A micro-batch by its counts; the seed is that of its inputs."""

    seed: int = 0
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 3


def perceptron():
    """A small model, the same on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def build(extended, **keywords):
    """An engine over the perceptron."""
    model = perceptron()
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=extended, **keywords)
    return engine


def forward(engine, seed):
    """The loss of three samples, which are the same on all ranks that ask for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 4, generator=generator).to(get_accelerator().current_device_name())
    return engine(x).pow(2).mean()


def one_pass(engine, seed, **counts):
    """A pass as a training loop writes it."""
    loss = engine.backward(forward(engine, seed), **counts)
    engine.step()
    return loss


def run_stream(engine, stream, **options):
    """Run a stream; returns how many passes were handed out and the steps that were taken."""
    handed, steps = 0, []
    for batch in engine.passes(stream, **options):
        handed += 1
        engine.backward(forward(engine, batch.seed))
        engine.step()
        if engine.window.passes == 0:
            steps.append(engine.last_step.step)
    return handed, steps


def let_go(engine):
    """The bare engine of one that is not used any more, whose optimizer it may step itself."""
    engine._self_driver.adapter.kept.end()
    return engine.__wrapped__


def refusal(call):
    """The error that `call` ends in, as text."""
    try:
        call()
    except ds_parity.DsParityError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def from_all(value):
    """The values of all ranks, in a list on every rank."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def listen():
    """Collect what ds_parity logs; returns the text, and a function that ends it."""
    text, logger = io.StringIO(), logging.getLogger("ds_parity")
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    return text, lambda: logger.removeHandler(handler)


def exchanges_of(engine):
    """How many collectives have exchanged counts."""
    return engine._self_driver.exchange.collectives


def sums_of(engine):
    """How many sums and gathers on the host were no exchange of counts."""
    return engine._self_driver.over.collectives - exchanges_of(engine)


def until_made(engine):
    """Wait until the thread that reads ahead has made what is announced next, or has ended without."""
    early, end = engine._self_driver.queue.early, time.monotonic() + 60
    while early is not None and early.known() is None and early._made._thread.is_alive() and time.monotonic() < end:
        time.sleep(0.001)


def ledger_of(engine):
    """What counts passes, windows and progress."""
    return engine._self_driver.ledger


def meter_of(engine):
    """What sums metrics over ranks."""
    return engine._self_driver.meter
