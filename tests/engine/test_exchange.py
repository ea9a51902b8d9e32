"""What ranks tell each other fits its numbers, tells places apart, and costs nothing where there is one rank."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from ds_parity.engine.ranks.exchange import Exchange
from ds_parity.engine.ranks.wire import Announcement, GatheredPass, Message, Peers, Place, heads_agree
from ds_parity.errors import RankDesyncError
from ds_parity.window import Counts, PassTotals

PLACE = Place("runs a pass", window=3, pass_index=17, configuration=0xABCDEF, engine=1)
MOST_RANKS = 4096
INT64 = 2**63 - 1


@st.composite
def fingerprints(draw):
    """24 bits from each of up to 4,096 ranks: all alike, or with a few that differ."""
    everyone = [draw(st.integers(0, 2**24 - 1))] * draw(st.integers(1, MOST_RANKS))
    for rank, other in draw(
        st.dictionaries(st.integers(0, MOST_RANKS - 1), st.integers(0, 2**24 - 1), max_size=4)
    ).items():
        everyone[rank % len(everyone)] = other
    return everyone


@pytest.fixture
def of_two_ranks():
    """An exchange whose other rank, here in the same process, sends what `other` makes of this rank's numbers."""

    def build(other):
        class Line:
            def start(self, vector, place):
                assert place == PLACE
                self.sum = vector + other(vector.clone())
                return self

            def wait(self):
                return self.sum

        return Exchange(Line(), ranks=2, slots=1, timeout=5.0)

    return build


# The fingerprint.


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "finishes"},
        *(
            {name: getattr(PLACE, name) + by}
            for name, by in product(("window", "pass_index", "configuration", "engine"), (-1, 1, 1000))
        ),
    ],
)
def test_places_that_differ_in_any_field_have_different_fingerprints(change):
    assert replace(PLACE, **change).fingerprint() != PLACE.fingerprint()


def test_sums_of_different_lengths_have_different_fingerprints():
    assert len({PLACE.fingerprint(length) for length in range(300)}) == 300


def test_ranks_up_to_300_passes_apart_have_different_fingerprints():
    assert len({replace(PLACE, pass_index=number).fingerprint() for number in range(300)}) == 300


@given(st.builds(Place, st.text(), *[st.integers(0, 2**63)] * 3))
def test_a_fingerprint_has_24_bits_and_is_the_same_for_equal_places(place):
    assert 0 <= place.fingerprint() < 2**24
    assert replace(place).fingerprint() == place.fingerprint()


@given(fingerprints())
@example([2**24 - 1] * MOST_RANKS)
@example([0] * (MOST_RANKS - 1) + [1])
@example([2**24 - 1] * (MOST_RANKS - 1) + [2**24 - 2])
def test_n_times_the_sum_of_squares_is_the_square_of_the_sum_exactly_where_all_sent_the_same(everyone):
    """And both sums that travel fit into int64."""
    total, squares = sum(everyone), sum(one * one for one in everyone)
    assert (len(everyone) * squares == total * total) == (len(set(everyone)) == 1)
    assert max(total, squares) <= INT64


@given(fingerprints())
@example([2**24 - 1] * (MOST_RANKS - 1) + [2**24 - 2])
def test_heads_agree_exactly_where_all_ranks_sent_the_same(everyone):
    sums = torch.tensor([[one, one * one] for one in everyone], dtype=torch.int64).sum(0).tolist()
    assert heads_agree(sums, len(everyone)) == (len(set(everyone)) == 1)


# One rank.


def test_with_one_rank_no_collective_is_started_and_the_answer_is_the_own_counts():
    """torch.distributed is not even initialised here."""
    exchange = Exchange(None, ranks=1, slots=3, timeout=1.0)
    known = exchange.start(PLACE, [Announcement(Counts(2, 1, 30)), Announcement()]).wait()
    ended = GatheredPass(PassTotals(), ranks_out_of_data=1)
    assert known == (GatheredPass(PassTotals(2, 1, 30, 1)), GatheredPass(PassTotals()), ended)
    assert exchange.collectives == 0


ANNOUNCEMENTS = st.builds(
    Announcement,
    st.builds(Counts, *[st.one_of(st.integers(0, 3), st.integers(0, 2**40))] * 3),
    st.booleans(),
    st.booleans(),
)


@given(ANNOUNCEMENTS)
@example(Announcement(Counts(2**40, 2**40 - 1, 2**39), True, True))
def test_counts_and_flags_of_any_size_come_back_as_they_went(one):
    counts = one.counts
    (known,) = Exchange(None, ranks=1, slots=1, timeout=1.0).start(PLACE, [one]).wait()
    totals = PassTotals(counts.rollouts, counts.prompts, counts.tokens, int(counts.rollouts > 0 or counts.tokens > 0))
    assert known == GatheredPass(totals, int(one.out_of_data), int(one.stuck))


# The wire.


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_the_sums_of_packed_messages_unpack_to_the_sums_of_what_was_announced(data, ranks, passes, peers):
    """Each micro-batch is announced by all of its peers and counted once."""
    announced = [data.draw(st.lists(ANNOUNCEMENTS, min_size=passes, max_size=passes).map(tuple)) for _ in range(ranks)]
    stops = data.draw(st.lists(st.booleans(), min_size=ranks * peers, max_size=ranks * peers))
    early = data.draw(st.lists(st.booleans(), min_size=ranks * peers, max_size=ranks * peers))
    plans = data.draw(st.lists(st.sampled_from((0, 1, 2, 2**18 - 1)), min_size=ranks * peers, max_size=ranks * peers))
    messages = [
        Message(
            announced[rank // peers],
            stops[rank],
            Peers(peers, rank % peers, rank // peers * peers),
            early=early[rank],
            begun=plans[rank],
        )
        for rank in range(ranks * peers)
    ]
    sums = [sum(column) for column in zip(*(message.pack() for message in messages), strict=True)]
    for message in messages:
        answer = message.unpack(sums)
        assert (answer.peers_agree, answer.stopping, answer.early) == (True, any(stops), sum(early))
        begin = [one for one in plans if one]
        assert (answer.begin, answer.plans_agree) == (len(begin), len(set(begin)) < 2)
        for at, gathered in enumerate(answer.passes):
            column = [one[at] for one in announced]
            assert gathered.totals == PassTotals.of([one.counts for one in column])
            assert gathered.ranks_out_of_data == sum(one.out_of_data for one in column)
            assert gathered.stuck_ranks == sum(one.stuck for one in column)


@given(st.data(), st.integers(2, 5))
def test_one_peer_with_other_counts_is_seen_by_all(data, ranks):
    odd = data.draw(st.integers(0, ranks - 1))
    peers = [
        Message((Announcement(Counts(1, tokens=int(rank == odd))),), peers=Peers(ranks, rank, 0))
        for rank in range(ranks)
    ]
    sums = [sum(column) for column in zip(*(message.pack() for message in peers), strict=True)]
    assert not any(message.unpack(sums).peers_agree for message in peers)


# Two ranks.


def test_with_two_ranks_the_answer_is_the_sum_and_one_collective_was_started(of_two_ranks):
    def other(numbers):
        numbers[:] = torch.tensor([0, 0, 0, 5, 1, 40, 1, 0, 0])
        return numbers

    exchange = of_two_ranks(other)
    assert exchange.start(PLACE, [Announcement(Counts(2, 1, 30))]).wait() == (GatheredPass(PassTotals(7, 2, 70, 2)),)
    assert exchange.collectives == 1


@pytest.mark.parametrize(("others", "arrives"), [([1.0, 0, 0, 0, 5, 1, 40, 1, 0, 0], True), ([0.0] * 10, False)])
def test_an_exchange_that_travels_with_a_step_arrives_where_the_other_rank_knows_its_passes_too(others, arrives):
    exchange = Exchange(None, ranks=2, slots=1, timeout=1.0)
    early = exchange.start_early(PLACE, [Announcement(Counts(2, 1, 30))])
    assert early.arrived() is None  # there was no room for it
    early.rider.summed = early.rider.numbers + torch.tensor(others, dtype=torch.float64)
    arrived = early.arrived()
    assert (None if arrived is None else arrived.wait()) == (
        (GatheredPass(PassTotals(7, 2, 70, 2)),) if arrives else None
    )
    assert exchange.collectives == 0


def test_a_rank_that_does_not_know_its_passes_sends_as_many_numbers_and_adds_nothing():
    exchange = Exchange(None, ranks=2, slots=3, timeout=1.0)
    known, unknown = (exchange.start_early(PLACE, passes).rider.numbers for passes in ([Announcement()], None))
    assert known.shape == unknown.shape == (1 + 3 + 3 * 6,)
    assert not unknown.any()


def test_peers_with_other_counts_are_left_to_an_exchange_that_explains_it():
    peers = [Exchange(None, 2, 1, 1.0, Peers(2, own, 0)) for own in range(2)]
    early = [one.start_early(PLACE, [Announcement(Counts(1, 0, own))]) for own, one in enumerate(peers)]
    for one in early:
        one.rider.summed = early[0].rider.numbers + early[1].rider.numbers
        assert one.arrived() is None


def test_what_travels_does_not_grow_with_the_ranks_five_numbers_and_six_a_pass():
    """Behind the two of the place."""
    lengths = []
    line = SimpleNamespace(start=lambda vector, place: lengths.append((len(vector), vector.dtype)))
    for ranks, slots in ((2, 1), (4096, 1), (2, 5)):
        Exchange(line, ranks, slots, timeout=1.0).start(PLACE, [])
    assert lengths == [(9, torch.int64), (9, torch.int64), (33, torch.int64)]
    assert len(PLACE.head(7)) == 2


def test_a_collective_that_fails_is_a_desync_with_the_place_and_the_time_limit(of_two_ranks, monkeypatch):
    def other(numbers):
        raise RuntimeError("Connection closed by peer\nand a long trace")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    says = r"rank 0 runs a pass, and waited in window 3, pass 17.*5 s .*\(Connection closed by peer\)$"
    with pytest.raises(RankDesyncError, match=says):
        of_two_ranks(other).start(PLACE, [])


@pytest.mark.parametrize(("own", "others", "known"), [(False, 0, False), (True, 0, True), (False, 1, True)])
def test_a_rank_that_asks_to_stop_is_heard_by_all_and_stays_heard(of_two_ranks, own, others, known):
    def other(numbers):
        numbers[0] = others if not heard else 0
        return numbers

    heard = []
    exchange = of_two_ranks(other)
    exchange.stop = own
    exchange.start(PLACE, []).wait()
    heard.append(exchange.stopping)
    exchange.stop = False
    exchange.start(PLACE, []).wait()
    assert [*heard, exchange.stopping] == [known, known]


# Ranks that share a micro-batch.


@given(st.lists(st.integers(0, 2**62), min_size=1), st.integers(2, 64), st.integers(0, MOST_RANKS))
def test_peers_that_hold_the_same_numbers_have_checksums_that_add_up_to_0(numbers, size, first):
    assert sum(Peers(size, own, first).checksum(numbers) for own in range(size)) == 0


@given(st.integers(0, 10**6), st.integers(1, 1000), st.integers(2, 8), st.data())
def test_a_peer_that_differs_in_one_number_is_seen(number, by, size, data):
    off = data.draw(st.integers(0, size - 1))
    sent = [[1, 0, number + by * (own == off), 1, 0, 0] for own in range(size)]
    assert sum(Peers(size, own, 4).checksum(numbers) for own, numbers in enumerate(sent)) != 0


def test_two_groups_that_differ_in_opposite_ways_do_not_cancel():
    total = sum(
        Peers(2, 1, first).checksum([10 + by]) + Peers(2, 0, first).checksum([10]) for first, by in ((0, 1), (2, -1))
    )
    assert total != 0


def test_checksums_of_many_ranks_fit_into_int64():
    assert MOST_RANKS * MOST_RANKS * 2**32 <= INT64


def test_only_the_first_of_the_peers_sends_counts_and_all_send_one_number_more():
    sent = []
    line = SimpleNamespace(start=lambda vector, place: sent.append(vector.tolist()))
    for own in (0, 1):
        Exchange(line, 4, 1, 1.0, Peers(2, own, 2)).start(PLACE, [Announcement(Counts(2, 1, 30))])
    assert [numbers[3:9] for numbers in sent] == [[2, 1, 30, 1, 0, 0], [0] * 6]
    assert sent[0][9] == -sent[1][9] != 0
