"""What ranks measure: the rivals in one process, window by window in turn, so that changes of load cancel."""

import gc
import itertools
import time
from functools import partial

import deepspeed
import torch
import torch.distributed as dist

import ds_parity
from benchmarks.own_part import OwnPart
from ds_parity.config import rewrite
from ds_parity.parity.data.model import TinyDecoder
from ds_parity.parity.running import weights
from ds_parity.parity.running.memory import LiveBytes
from ds_parity.parity.running.own_batches import own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import weight


def build(seed, width):
    """A decoder of four layers."""
    torch.manual_seed(seed)
    return TinyDecoder(width=width, layers=4, heads=8)


build_64, build_128, build_256, build_512 = (partial(build, width=width) for width in (64, 128, 256, 512))


class Rivals:
    """ds_parity's engine and the bare one over the same model, and one window of micro-batches for both."""

    def __init__(self, scenario):
        wanted = Scenario.from_json(scenario)
        self.wrapped = self._engine(wanted, ds_parity.initialize, wanted.config)
        self.another_bare = partial(
            self._engine, wanted, deepspeed.initialize, rewrite(wanted.config, wanted.ranks).config
        )
        self.bare = self.another_bare()
        self.batches, self.idle = own_batches(wanted), stand_in(wanted)
        self.unit, self.ahead = wanted.settings.loss_weight, wanted.settings.lookahead != 0
        self.stream = self.wrapped.passes(itertools.cycle(self.batches), finish=False)  # endless, as a trainer's is
        self.total = float(sum(weight(batch, self.unit) for row in wanted.batches() for batch in row))

    def _engine(self, wanted, initialize, config):
        model = wanted.build()
        return initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    @property
    def exchanges(self):
        """The collectives that ds_parity has started for counts."""
        return self.wrapped._self_driver.exchange.collectives

    def window_of_ds_parity(self):
        if self.ahead:
            for batch in itertools.islice(self.stream, len(self.batches)):
                self.wrapped.backward(self.wrapped(**batch.inputs))
                self.wrapped.step()
            return
        for batch in self.batches:
            if batch.rollouts:
                loss = self.wrapped(**batch.inputs)
                self.wrapped.backward(loss, rollouts=batch.rollouts, tokens=batch.tokens)
            else:
                self.wrapped.idle(self.wrapped(**self.idle.inputs))
            self.wrapped.step()

    def window_by_hand(self, bare=None):
        """The same window as an RL trainer writes it, its total known beforehand, at no cost."""
        bare = bare or self.bare
        share = self.total / dist.get_world_size()
        for index, batch in enumerate(self.batches):
            bare.set_gradient_accumulation_boundary(index == len(self.batches) - 1)
            units = weight(batch, self.unit)
            loss = bare(**(batch if batch.rollouts else self.idle).inputs)
            bare.backward(loss / (share / units) if units else loss * 0.0, scale_wrt_gas=False)
            bare.step()


def in_turn(windows, rounds):
    """Seconds a window of each rival; the order is swapped every round, and the first round is to warm up."""
    taken = {name: [] for name in windows}
    gc.disable()
    for number in range(rounds + 1):
        for name in list(windows)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            windows[name]()
            if number:
                taken[name].append(time.perf_counter() - begun)
    gc.enable()
    return taken


def step_time(scenario, rounds):
    """Seconds by rival; passes and exchanges of ds_parity; and whether both end with the same weights."""
    rivals = Rivals(scenario)
    seconds = in_turn({"ds_parity": rivals.window_of_ds_parity, "by hand": rivals.window_by_hand}, rounds)
    return {"seconds": seconds, **_counted(rivals), "same weights": same_weights(rivals.wrapped, rivals.bare)}


def step_time_and_chance(scenario, rounds):
    """The same beside a second engine that is driven by hand: how far a ratio is off 1 by chance; and the own part."""
    rivals = Rivals(scenario)
    again, own = rivals.another_bare(), OwnPart(rivals.wrapped.__wrapped__)
    windows = {
        "ds_parity": own.of(rivals.window_of_ds_parity),
        "by hand": rivals.window_by_hand,
        "again": partial(rivals.window_by_hand, again),
    }
    seconds = in_turn(windows, rounds)
    same = same_weights(rivals.wrapped, rivals.bare, again)
    return {"seconds": seconds, "own": own.shares[1:], "same weights": same}


class CallersRivals:
    """An engine whose caller ends windows, and DeepSpeed with unmanaged accumulation, over the same window."""

    def __init__(self, scenario):
        wanted = Scenario.from_json(scenario)
        plain = rewrite(wanted.config, wanted.ranks).config
        self.batches = own_batches(wanted)
        steps = len(self.batches)
        sizes = {"gradient_accumulation_steps": steps, "train_batch_size": steps * wanted.ranks}
        unmanaged = {**plain, **sizes, "managed_gradient_accumulation": False}
        self.wrapped = self._engine(wanted, ds_parity.initialize, wanted.config)
        self.bare, self.again = (self._engine(wanted, deepspeed.initialize, unmanaged) for _ in range(2))

    def _engine(self, wanted, initialize, config):
        model = wanted.build()
        return initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def window_of_ds_parity(self):
        for batch in self.batches:
            self.wrapped.backward(self.wrapped(**batch.inputs), rollouts=batch.rollouts, tokens=batch.tokens)
        self.wrapped.step()

    def window_unmanaged(self, again=False):
        """DeepSpeed divides by the number of backwards, and exchanges no counts."""
        engine = self.again if again else self.bare
        for batch in self.batches:
            engine.backward(engine(**batch.inputs))
        engine.step()


def callers_time(scenario, rounds):
    """Seconds by rival, ds_parity's own part of its windows, and whether both end with the same weights."""
    rivals = CallersRivals(scenario)
    own = OwnPart(rivals.wrapped.__wrapped__)
    windows = {
        "ds_parity": own.of(rivals.window_of_ds_parity),
        "unmanaged": rivals.window_unmanaged,
        # What another engine of the same kind takes says how far a ratio is off 1 by chance.
        "again": partial(rivals.window_unmanaged, again=True),
    }
    seconds = in_turn(windows, rounds)
    same = same_weights(rivals.wrapped, rivals.bare, rivals.again)
    return {"seconds": seconds, "own": own.shares[1:], "same weights": same}


def accelerate_time(scenario, rounds):
    """The same with accelerate's loop as a third."""
    from benchmarks.accelerated import Accelerated

    rivals, theirs = Rivals(scenario), Accelerated(scenario)
    windows = {"ds_parity": rivals.window_of_ds_parity, "by hand": rivals.window_by_hand, "accelerate": theirs.window}
    seconds = in_turn(windows, rounds)
    steps = [rivals.wrapped.global_steps, rivals.bare.global_steps, theirs.net.global_steps]
    same = same_weights(rivals.wrapped, rivals.bare, theirs.net)
    return {"seconds": seconds, "steps": steps, "same weights": same}


def _counted(rivals):
    return {"passes": rivals.wrapped._self_driver.ledger.passes, "exchanges": rivals.exchanges}


def same_weights(*engines):
    """Whether all hold the same weights bit for bit."""
    first, *others = [weights.vector(engine.module) for engine in engines]
    return all(torch.equal(first, other) for other in others)


def memory(scenario):
    """Peak bytes allocated above the start in one corrected window of each rival."""
    rivals = Rivals(scenario)
    for _ in range(2):
        rivals.window_of_ds_parity()
        rivals.window_by_hand()
    parameters = rivals.wrapped.module.parameters()
    return {
        "ds_parity": _peak(rivals.window_of_ds_parity),
        "by hand": _peak(rivals.window_by_hand),
        "gradients": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "corrected": rivals.wrapped._self_driver.boundary.finished.window.expected != rivals.total,
    }


def _peak(run):
    gc.collect()
    with LiveBytes() as allocated:
        run()
    return allocated.peak
