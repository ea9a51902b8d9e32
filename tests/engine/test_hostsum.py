"""Recursive doubling gives every rank the same sum, for any number of ranks, in as few rounds as can be.

The lines between ranks are queues here, and the ranks threads; two and four real ranks run it in tests/distributed.
"""

import math
import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.ranks.hostsum import HostSum


class Lines(defaultdict):
    """A queue for each pair of ranks; two threads that ask for a new one at once get the same."""

    def __init__(self):
        super().__init__(queue.Queue)
        self._lock = threading.Lock()

    def __getitem__(self, pair):
        with self._lock:
            return super().__getitem__(pair)


class Line(HostSum):
    """One rank whose messages go through queues."""

    def __init__(self, rank, ranks, lines):
        self._rank, self._members, self._lines = rank, list(range(ranks)), lines
        self._core = 1 << (ranks.bit_length() - 1)
        self._group = self  # each rank is a process of its own elsewhere
        self.sent = []

    def send(self, vector, to, tag):
        self.sent.append(to)
        self._lines[self._rank, to, tag].put(vector.clone())
        return SimpleNamespace(wait=lambda: None)

    def receive(self, like, source, tag):
        received = self._lines[source, self._rank, tag].get(timeout=10)
        assert received.shape == like.shape
        return received


def summed(ranks, vectors):
    """Return what each rank holds at the end, and whom it sent to."""
    lines = Lines()
    members = [Line(rank, ranks, lines) for rank in range(ranks)]
    results = [None] * ranks

    def run(rank):
        results[rank] = members[rank].start(vectors[rank]).wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, [member.sent for member in members], lines


@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 32, 33])
def test_every_rank_ends_with_the_sum_and_no_message_is_left_over(ranks):
    vectors = [torch.tensor([rank**2, -rank, 2**40 + rank]) for rank in range(ranks)]
    results, sent, lines = summed(ranks, vectors)
    total = torch.stack(vectors).sum(0)
    assert all(torch.equal(result, total) for result in results)
    assert all(line.empty() for line in lines.values())
    assert max(map(len, sent)) <= math.ceil(math.log2(ranks)) + 1 if ranks > 1 else not sent[0]


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_fp64_sums_are_the_same_on_every_rank_to_the_last_bit(ranks):
    """Partial sums are swapped in pairs, and a + b is b + a."""
    vectors = [
        torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)
    ]
    results, _, _ = summed(ranks, vectors)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_sum_that_nobody_waited_for_leaves_nothing_for_the_next():
    """A loop that is left between announcing a pass and its backward, on one rank or on both."""
    for waits in ((False, False), (True, False)):
        lines = Lines()
        members = [Line(rank, 2, lines) for rank in range(2)]
        first = [member.start(torch.tensor([1 + rank])) for rank, member in enumerate(members)]
        for sum_of_rank, wait in zip(first, waits, strict=True):
            if wait:
                assert int(sum_of_rank.wait()) == 3
        second = [member.start(torch.tensor([10 + rank])) for rank, member in enumerate(members)]
        assert [int(sum_of_rank.wait()) for sum_of_rank in second] == [21, 21]
        assert [int(sum_of_rank.wait()) for sum_of_rank in first] == [3, 3], "a late waiter still gets its own"


def test_the_own_vector_is_left_as_it_was():
    vectors = [torch.tensor([1]), torch.tensor([2])]
    summed(2, vectors)
    assert [int(vector) for vector in vectors] == [1, 2]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_rank_that_waits_needs_the_others_only_to_proceed(ranks):
    """They may be in a forward that waits for the one that waits."""
    lines = Lines()
    sums = [Line(rank, ranks, lines).start(torch.tensor([2**rank])) for rank in range(ranks)]
    for one in sums[:-1]:
        one.proceed()
        one.proceed()
    assert [int(one.wait()) for one in reversed(sums)] == [2**ranks - 1] * ranks
    assert all(line.empty() for line in lines.values())


def test_a_sum_that_fails_in_its_thread_fails_where_it_is_waited_for():
    def gone(like, source, tag):
        raise RuntimeError("connection closed by peer")

    member = Line(0, 2, Lines())
    member.receive = gone
    running = member.start(torch.tensor([1]))
    running.proceed()
    with pytest.raises(RuntimeError, match="closed by peer"):
        running.wait()


def test_after_an_interrupt_nothing_hangs_and_nothing_follows():
    """Ctrl-C in a notebook, while a rank is waited for: its message may be lost, or be taken for the next sum's."""

    def interrupted(like, source, tag):
        raise KeyboardInterrupt

    member = Line(0, 2, Lines())
    member.receive = interrupted
    running = member.start(torch.tensor([1]))
    with pytest.raises(KeyboardInterrupt):
        running.wait()
    for next_one in (running.wait, lambda: member.start(torch.tensor([2]))):
        with pytest.raises(RuntimeError, match="interrupted, and no other can follow it: start again"):
            next_one()
