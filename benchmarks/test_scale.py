"""What a window costs a rank as ranks become more: the real planner, exchange and window over a counting wire."""

import gc
import math
import statistics
import threading
import tracemalloc

import numpy as np
import torch

from benchmarks.results import Section
from benchmarks.test_exchange import SimulatedSum, Wire
from benchmarks.test_plan import seconds
from benchmarks.test_waiting import COST, of_reasoning
from ds_parity.engine.ranks.exchange import Exchange
from ds_parity.engine.ranks.hostsum import PlacedSum
from ds_parity.engine.ranks.wire import Announcement, Place
from ds_parity.engine.record.metrics import Meter
from ds_parity.planning import Rollout, plan
from ds_parity.window import Counts, Ledger, Rules

RANKS = (8, 64, 512, 4096)
PASSES = 16
EACH = 16  # rollouts of a rank in a window, one a pass
WINDOWS = 2


class KnownSum(SimulatedSum):
    """Knows with whom it has talked: each is a connection."""

    def __init__(self, wire, rank, ranks):
        super().__init__(wire, rank, ranks)
        self.partners = set()

    def send(self, vector, to, tag):
        self.partners.add(to)
        return super().send(vector, to, tag)

    def receive(self, length, source, tag):
        self.partners.add(source)
        return super().receive(length, source, tag)


class Rank:
    """What a rank keeps to know where windows end, and what a step was."""

    def __init__(self, wire, rank, ranks):
        self.over = KnownSum(wire, rank, ranks)
        self.exchange = Exchange(self.over, ranks, PASSES, 600)
        self.ledger = Ledger(Rules(EACH * ranks, ranks))
        self.meter = Meter(torch.device("cpu"), None, PlacedSum(self.over, lambda: Place("sums a step")))
        self.losses = []

    def window(self):
        known = self.exchange.start(
            Place("runs a pass"), [Announcement(Counts(1, 0, 10)) for _ in range(PASSES)]
        ).wait()
        totals = [one.totals for one in known]
        for number, one in enumerate(totals):
            assert not self.ledger.window.closed
            self.meter.add(torch.tensor(2.0), 1)
            self.ledger.count(one, totals[number + 1 :])
        assert self.ledger.window.closed
        loss, _ = self.meter.settle().read()
        self.losses.append(loss / self.ledger.total())
        self.ledger.settle(applied=True)


def run(ranks):
    """Run the windows on as many threads; returns the wire of the last window, the ranks, and what each keeps."""
    gc.collect()
    tracemalloc.start()
    wire = Wire()
    every = [Rank(wire, rank, ranks) for rank in range(ranks)]
    for _ in range(WINDOWS):
        wire.messages.clear()
        wire.bytes.clear()
        _in_threads([one.window for one in every])
    gc.collect()
    wire.queues.clear()
    kept = tracemalloc.get_traced_memory()[0] / ranks
    tracemalloc.stop()
    return wire, every, kept


def _in_threads(actions):
    before = threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.stack_size(before)


def planned(ranks):
    """The seconds of a plan, beside those of sorting its rollouts, and its bytes for each rollout."""
    lengths = of_reasoning(EACH * ranks, np.random.default_rng(0))
    rollouts = [Rollout("p", range(length), 1) for length in lengths.tolist()]
    options = {"dp_world_size": ranks, "target": len(rollouts), "max_tokens": 65_536}
    taken, made = zip(*[seconds(lambda: plan(rollouts, **options, cost=COST)) for _ in range(3)], strict=True)
    arrays = [made[0].lengths, made[0].squares, made[0].left]
    arrays += [array for window in made[0].windows for array in (window.rollouts, window.ends, window.sizes)]
    return statistics.median(taken), sum(array.nbytes for array in arrays) / len(rollouts)


SAID = f"""\
Simulated: real planner, exchange, window and meter, each rank a thread, messages counted on the way. Windows of
{PASSES} passes and {EACH} rollouts a rank, `lookahead: {PASSES}`, no metrics; what the busiest rank sends in a window
after the first. *Kept*: memory that a rank keeps between windows. *Planning*: by cost, every rank plans the whole
window; its time for each rollout is beside that on {RANKS[0]} ranks. Counted; the last column is timed."""


def test_growth_with_ranks(benchmark, results):
    rows, seen = [], {}

    def measure():
        for ranks in RANKS:
            wire, every, kept = run(ranks)
            assert all(one.losses == [2.0] * WINDOWS for one in every)
            taken, size = planned(ranks)
            most = (max(wire.messages.values()), max(wire.bytes.values()), max(len(one.over.partners) for one in every))
            seen[ranks] = (*most, kept, taken / EACH / ranks)
            each = seen[ranks][-1] / seen[RANKS[0]][-1]
            collectives = every[0].over.collectives // WINDOWS
            rows.append(
                (
                    *(f"{ranks:,}", str(collectives), str(most[0]), f"{most[1]:,}", str(most[2] + 1), f"{kept:,.0f}"),
                    *(f"{size:.0f}", f"{each:.2f}"),
                )
            )

    benchmark.pedantic(measure, rounds=1)
    header = (
        *("ranks", "host collectives", "messages", "bytes", "sockets", "bytes kept"),
        *("bytes of a plan, each rollout", "planning, each rollout"),
    )
    results(Section("scale", "Growth with ranks", SAID, header, rows))
    for ranks, (messages, sent, partners, kept, _) in seen.items():
        rounds = math.log2(ranks)
        assert messages == 2 * rounds
        assert sent <= 2 * rounds * 1024 + 1024
        assert partners == rounds
        assert kept <= 1.2 * seen[RANKS[0]][3]  # what all ranks of a process share is divided by more of them
    # Linear in rollouts: each costs no more where there are 512 times as many.
    assert seen[RANKS[-1]][-1] <= 2 * seen[RANKS[0]][-1]
