"""Recursive doubling gives every rank the same sum, for any number of ranks, in as few rounds as can be.

The lines between ranks are queues here, and the ranks threads; two and four real ranks run it in tests/distributed.
"""

import math
import queue
import re
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ds_parity.engine.ranks.hostsum import CAPACITY, HostSum, PlacedSum, core_of
from ds_parity.engine.ranks.wire import Place
from ds_parity.errors import RankDesyncError, WindowError

PLACE = Place("runs a pass", window=3, pass_index=17, configuration=0xABCDEF, engine=1)


@pytest.fixture(autouse=True)
def _rank_of_a_job(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


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
        self._core = core_of(ranks)
        self._group = self  # each rank is a process of its own elsewhere
        self.sent, self.collectives, self.losses = [], 0, 0

    def send(self, vector, to, tag):
        assert len(vector) <= CAPACITY or tag >= 64, "more than there is room for, before ranks were seen to agree"
        self.sent.append(to)
        self._lines[self._rank, to, tag].put(vector.clone())
        return lambda: None

    def receive(self, length, source, tag):
        sent = self._lines[source, self._rank, tag].get(timeout=10)
        received = torch.zeros(max(length, CAPACITY), dtype=torch.int64)
        received[: len(sent)] = sent
        return received[:length]

    def lost(self):
        self.losses += 1

    def gathered(self, value):
        for other in self._members:
            self._lines[self._rank, other, "gather"].put(value)
        return [self._lines[other, self._rank, "gather"].get(timeout=10) for other in self._members]


def summed(ranks, vectors, places=None):
    """Return what each rank holds at the end, or raised, and whom it sent to."""
    lines = Lines()
    members = [Line(rank, ranks, lines) for rank in range(ranks)]
    results = [None] * ranks

    def run(rank):
        try:
            results[rank] = members[rank].start(vectors[rank], places[rank] if places else PLACE).wait()
        except RankDesyncError as error:
            results[rank] = error

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
        first = [member.start(torch.tensor([1 + rank]), PLACE) for rank, member in enumerate(members)]
        for sum_of_rank, wait in zip(first, waits, strict=True):
            if wait:
                assert int(sum_of_rank.wait()) == 3
        second = [member.start(torch.tensor([10 + rank]), PLACE) for rank, member in enumerate(members)]
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
    sums = [Line(rank, ranks, lines).start(torch.tensor([2**rank]), PLACE) for rank in range(ranks)]
    for one in sums[:-1]:
        one.proceed()
        one.proceed()
    assert [int(one.wait()) for one in reversed(sums)] == [2**ranks - 1] * ranks
    assert all(line.empty() for line in lines.values())


def test_a_sum_that_fails_in_its_thread_fails_where_it_is_waited_for():
    def gone(length, source, tag):
        raise RuntimeError("connection closed by peer")

    member = Line(0, 2, Lines())
    member.receive = gone
    running = member.start(torch.tensor([1]), PLACE)
    running.proceed()
    with pytest.raises(RuntimeError, match="closed by peer"):
        running.wait()


def test_after_an_interrupt_nothing_hangs_and_nothing_follows():
    """Ctrl-C in a notebook, while a rank is waited for: its message may be lost, or be taken for the next sum's."""

    def interrupted(length, source, tag):
        raise KeyboardInterrupt

    member = Line(0, 2, Lines())
    member.receive = interrupted
    running = member.start(torch.tensor([1]), PLACE)
    with pytest.raises(KeyboardInterrupt):
        running.wait()
    for next_one in (running.wait, lambda: member.start(torch.tensor([2]), PLACE)):
        with pytest.raises(RuntimeError, match="interrupted, and no other can follow it: start again"):
            next_one()


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
@pytest.mark.parametrize("length", [0, CAPACITY - 2, CAPACITY - 1, CAPACITY, 3 * CAPACITY])
def test_a_vector_of_any_length_and_both_types_is_summed_and_none_travels_at_once_beyond_the_room(ranks, kind, length):
    vectors = [torch.arange(length, dtype=kind) * 3 + rank for rank in range(ranks)]
    results, sent, lines = summed(ranks, vectors)
    assert all(torch.equal(result, torch.stack(vectors).sum(0)) for result in results)
    assert all(line.empty() for line in lines.values())
    rounds = math.ceil(math.log2(ranks)) + 1
    assert max(map(len, sent)) <= rounds * (1 if length <= CAPACITY - 2 else 2)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("other", "length", "says"),
    [
        (replace(PLACE, engine=2), 3, "rank 0 runs a pass in window 3, pass 17, engine 2, .*initialize its engines"),
        (Place("sums the loss", 3, 17, 0xABCDEF, 1), 3, "sums the loss in window 3.*same number of passes"),
        (replace(PLACE, error="ValueError: no"), 3, r"stops because another did.*has raised ValueError: no \(it runs"),
        (PLACE, 2 * CAPACITY, f"They sum different amounts of numbers there .*{2 * CAPACITY}"),
        (Place("initializes an engine"), 0, r"rank 0 initializes an engine\. "),
    ],
)
def test_ranks_that_come_for_different_things_are_all_told_whatever_the_sizes(ranks, other, length, says):
    """And nothing is left over, so that other groups and another engine can go on."""
    places = [PLACE] * (ranks - 1) + [other]
    vectors = [torch.zeros(CAPACITY * 3 if rank == 0 else 3, dtype=torch.int64) for rank in range(ranks - 1)]
    results, _, lines = summed(ranks, [*vectors, torch.zeros(length, dtype=torch.float64)], places)
    assert [type(result) for result in results] == [RankDesyncError] * ranks
    assert all(re.search(says, str(result)) for result in results), str(results[0])
    assert all(line.empty() for line in lines.values())


def test_a_rank_that_waits_elsewhere_is_told_by_the_sum_that_goes_on_in_a_thread():
    lines = Lines()
    members = [Line(rank, 2, lines) for rank in range(2)]
    sums = [member.start(torch.tensor([1]), replace(PLACE, window=at)) for at, member in enumerate(members)]
    assert sums[0].failure(0.0) is None, "nobody waits for it yet"
    sums[0].proceed()
    assert sums[0].failure(0.0) is None, "the other has not come"
    with pytest.raises(RankDesyncError, match="not in the same place"):
        sums[1].wait()
    assert "not in the same place" in str(sums[0].failure(10.0))


def test_a_gather_finds_its_ranks_by_a_sum_and_both_are_counted_as_one():
    lines = Lines()
    members = [Line(rank, 2, lines) for rank in range(2)]
    results = [None, None]

    def run(rank):
        results[rank] = PlacedSum(members[rank], lambda: PLACE).gather({"rank": rank})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[{"rank": 0}, {"rank": 1}]] * 2
    assert [member.collectives for member in members] == [1, 1]


class Handler(Line):
    """A rank in whose wait a signal handler starts a sum of its own."""

    said = ""

    def receive(self, length, source, tag):
        if not self.said:
            self.said = "nothing was raised"
            try:
                self.start(torch.ones(1, dtype=torch.int64), PLACE).wait()
            except WindowError as error:
                self.said = str(error)
        return super().receive(length, source, tag)


def test_a_sum_that_a_signal_handler_starts_inside_another_is_refused_and_does_not_hang():
    lines = Lines()
    ranks = [Handler(0, 2, lines), Line(1, 2, lines)]
    sums = [rank.start(torch.tensor([number + 1]), PLACE) for number, rank in enumerate(ranks)]
    other = threading.Thread(target=sums[1].wait, daemon=True)
    other.start()
    assert sums[0].wait().tolist() == [3]
    other.join(10)
    assert ranks[0].said.startswith("a call that talks to other ranks was made in a signal handler")
