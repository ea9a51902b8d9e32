"""Counts that come pass by pass, waited for in front of a backward or behind it: ranks are threads that sleep."""

import random
import threading
import time

from benchmarks.results import Section, divided, shown
from benchmarks.test_exchange import SimulatedSum, Wire
from ds_parity.engine.ranks.exchange import Exchange
from ds_parity.engine.ranks.wire import Announcement, Place
from ds_parity.window import Counts

PASSES, ROUNDS, FORWARD = 8, 5, 0.02
RANKS = (2, 8, 32)
SPREADS = {"alike": 0.1, "uneven": 0.3, "very uneven": 0.8}
WAYS = ("by hand", "in front", "behind")
SAID = f"""\
Windows of {PASSES} passes whose counts come pass by pass, beside passes that exchange nothing, as bare DeepSpeed runs
them on ZeRO 0 and 1. *In front*: counts are waited for between forward and backward. *Behind*: after the backward, but
for the first pass of a window. The real exchange between threads; a forward and a backward sleep, of lengths from a
log-normal distribution (sigma {", ".join(f"{value} {name}" for name, value in SPREADS.items())}), the backward twice
as long. So no rank takes another one's core."""


class Rank:
    """A rank, and the windows that it runs."""

    def __init__(self, wire, rank, ranks, spread, together):
        self.exchange = Exchange(SimulatedSum(wire, rank, ranks), ranks, 1, 600)
        self.rng, self.spread, self.together = random.Random(rank), spread, together
        self.seconds = {way: [] for way in WAYS}

    def rounds(self):
        for number in range(ROUNDS):
            lengths = [FORWARD * self.rng.lognormvariate(0, self.spread) for _ in range(PASSES)]
            for way in WAYS:
                self.together.wait()
                begun = time.perf_counter()
                for index, length in enumerate(lengths):
                    self._run(way, length, Place(f"runs a pass {way}", number, index))
                self.together.wait()
                self.seconds[way].append(time.perf_counter() - begun)

    def _run(self, way, length, place):
        time.sleep(length)
        if way == "by hand":
            time.sleep(2 * length)
            return
        pending = self.exchange.start(place, [Announcement(Counts(1, 0, 10))])
        if way == "behind" and place.pass_index:
            pending.proceed()
            time.sleep(2 * length)
            pending.wait()
        else:
            pending.wait()
            time.sleep(2 * length)


def measured(ranks, spread):
    """Seconds of each window by way, on the first rank: all begin and end together."""
    wire, together = Wire(), threading.Barrier(ranks)
    every = [Rank(wire, rank, ranks, spread, together) for rank in range(ranks)]
    threads = [threading.Thread(target=one.rounds) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return every[0].seconds


def test_waiting_behind_the_backward(benchmark, results):
    rows = []

    def measure():
        for ranks in RANKS:
            for name, spread in SPREADS.items():
                seconds = measured(ranks, spread)
                ratios = [divided(seconds[over], seconds[under]) for over, under in PAIRS]
                rows.append((str(ranks), name, *map(shown, ratios)))

    benchmark.pedantic(measure, rounds=1)
    header = ("ranks", "passes", *(f"{over} / {under}" for over, under in PAIRS))
    results(Section("late", "Where counts are waited for", SAID, header, rows))


PAIRS = (("in front", "by hand"), ("behind", "by hand"), ("behind", "in front"))
