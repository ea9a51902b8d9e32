"""What the exchange of counts costs on thousands of ranks: the real algorithm over a wire that counts, beside the recipe's."""

import threading
from collections import Counter
from queue import SimpleQueue

import pytest
import torch

from ds_parity.engine.exchange import Exchange, Place, Slot
from ds_parity.engine.hostsum import HostSum
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


class Sent:
    def wait(self):
        """It is on its way."""


class SimulatedSum(HostSum):
    """The same rounds; only who carries a vector is another."""

    def __init__(self, wire, rank, ranks):
        self._wire, self._rank, self._group = wire, rank, (id(wire), rank)
        self._members = range(ranks)
        self._core = 1 << (ranks.bit_length() - 1)

    def send(self, vector, to, tag):
        self._wire.messages[self._rank] += 1
        self._wire.bytes[self._rank] += vector.numel() * vector.element_size()
        self._wire.queue(self._rank, to, tag).put(vector.clone())
        return Sent()

    def receive(self, like, source, tag):
        return self._wire.queue(source, self._rank, tag).get(timeout=120)


def exchanged(ranks, slots):
    """One exchange of `slots` passes; returns the wire and what each rank learned."""
    wire, learned = Wire(), [None] * ranks

    def run(rank):
        exchange = Exchange(None, 1, slots, 600)
        exchange.ranks, exchange._sum = ranks, SimulatedSum(wire, rank, ranks)
        held = [Slot(Counts(1 + rank % 3, 0, rank + at), active=True) for at in range(slots)]
        learned[rank] = exchange.start(Place("runs a pass", 0, 0, 0), held).wait()

    before = threading.stack_size(512 * 1024)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.stack_size(before)
    return wire, learned


@pytest.mark.parametrize("ranks", [64, 1000, 4096])
@pytest.mark.parametrize("lookahead", [1, PASSES], ids=["pass by pass", "the window ahead"])
def test_what_travels_for_a_window_of_16_passes(benchmark, capsys, ranks, lookahead):
    wire, learned = benchmark.pedantic(exchanged, (ranks, lookahead), rounds=1)
    expected = [sum(rank + at for rank in range(ranks)) for at in range(lookahead)]
    assert all([known.totals.tokens for known in one] == expected for one in learned)
    times = PASSES // lookahead
    most = max(range(ranks), key=lambda rank: wire.messages[rank])
    messages, sent = times * wire.messages[most], times * wire.bytes[most]
    # A ring, as gloo and NCCL run an all_gather of so little: every rank passes on what all others hold.
    ring, ring_sent = PASSES * (ranks - 1), PASSES * (ranks - 1) * 8
    benchmark.extra_info |= {"messages": messages, "bytes": sent, "of the recipe's messages": messages / ring}
    with capsys.disabled():
        print(
            f"\n{ranks:,} ranks: {times} collectives, {messages} messages and {sent:,} bytes from the busiest rank; "
            f"the recipe: {PASSES} collectives, {ring:,} messages and {ring_sent:,} bytes from each"
        )
    assert torch.tensor(list(wire.messages.values())).max() <= ranks.bit_length() + 2
