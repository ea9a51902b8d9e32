"""What the exchange of counts costs on thousands of ranks: the real algorithm over a wire that counts messages."""

import threading
from collections import Counter
from queue import SimpleQueue

from benchmarks.results import Section
from ds_parity.engine.ranks.exchange import Exchange
from ds_parity.engine.ranks.hostsum import HostSum, core_of
from ds_parity.engine.ranks.wire import Announcement, Place
from ds_parity.window import Counts

PASSES = 16


class Wire:
    """Messages between ranks that are threads, counted by sender."""

    def __init__(self):
        self.queues, self.lock = {}, threading.Lock()
        self.messages, self.bytes = Counter(), Counter()

    def queue(self, *key):
        with self.lock:
            return self.queues.setdefault(key, SimpleQueue())


class SimulatedSum(HostSum):
    """The same rounds; only who carries a vector is another."""

    def __init__(self, wire, rank, ranks):
        self._wire, self._rank, self._group = wire, rank, (id(wire), rank)
        self._members = range(ranks)
        self._core = core_of(ranks)
        self.collectives = 0

    def send(self, vector, to, tag):
        self._wire.messages[self._rank] += 1
        self._wire.bytes[self._rank] += vector.numel() * vector.element_size()
        self._wire.queue(self._rank, to, tag).put(vector.clone())
        return lambda: None

    def receive(self, length, source, tag):
        return self._wire.queue(source, self._rank, tag).get(timeout=120)


def exchanged(ranks, slots):
    """One exchange of `slots` passes; returns the wire and what each rank learned."""
    wire, learned = Wire(), [None] * ranks

    def run(rank):
        exchange = Exchange(SimulatedSum(wire, rank, ranks), ranks, slots, 600)
        passes = [Announcement(Counts(1 + rank % 3, 0, rank + at)) for at in range(slots)]
        learned[rank] = exchange.start(Place("runs a pass"), passes).wait()

    before = threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.stack_size(before)
    return wire, learned


SAID = f"""\
The real algorithm over a wire that counts, a window of {PASSES} passes, what the busiest rank sends; beside an
`all_gather` of a count a pass in a ring, as gloo and NCCL run one of so little. Counted, not timed."""


def test_what_travels_for_a_window_of_16_passes(benchmark, results):
    """Every rank learns the sums, in about log2(ranks) messages a collective."""
    rows = []

    def measure():
        for ranks in (64, 1000, 4096):
            # In the ring every rank passes on the counts of all others.
            rows.append(
                (f"{ranks:,}", "the ring", *_cells(PASSES, PASSES * (ranks - 1), PASSES * (ranks - 1) * 8), "1")
            )
            rows.extend(
                _row(ranks, lookahead, said) for lookahead, said in ((1, "pass by pass"), (PASSES, "the window ahead"))
            )

    benchmark.pedantic(measure, rounds=1)
    header = ("ranks", "", "collectives", "messages", "bytes", "messages / the ring's")
    results(Section("exchange", "What the exchange of counts sends", SAID, header, rows))


def _row(ranks, lookahead, said):
    wire, learned = exchanged(ranks, lookahead)
    expected = [sum(rank + at for rank in range(ranks)) for at in range(lookahead)]
    assert all([known.totals.tokens for known in one] == expected for one in learned)
    assert max(wire.messages.values()) <= ranks.bit_length() + 2
    times = PASSES // lookahead
    most = max(range(ranks), key=lambda rank: wire.messages[rank])
    messages = times * wire.messages[most]
    cells = _cells(times, messages, times * wire.bytes[most])
    return f"{ranks:,}", said, *cells, f"{messages / (PASSES * (ranks - 1)):.5f}"


def _cells(*numbers):
    return (f"{number:,}" for number in numbers)
