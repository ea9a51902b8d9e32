"""Rollouts that are in no step, in windows that have the reference's passes: no target ends one stream so."""

import random

import pytest

from tests.parity.test_window_faults import STREAMS, TARGET, cut, named, stream

RANKS = 4
# Rollouts and passes of a run in which each micro-batch of two rollouts or more lacks its last one.
DUE = [(25, 4), (22, 6), (26, 4), (25, 5), (22, 3), (11, 2)]
LACKING = [(18, 4), (14, 6), (18, 4), (18, 5), (15, 3), (6, 2)]


def dropping(steps, seed):
    """Windows of micro-batches of one to three rollouts, and the same without the last rollout of each longer one."""
    draw = random.Random(seed)
    passes = [[draw.randint(1, 3) for _ in range(RANKS)] for _ in range(100)]
    due, begin, own = cut([sum(it) for it in passes], 24)[:steps], 0, []
    for _, count in due:
        window = passes[begin : begin + count]
        own.append((sum(max(1, held - 1) for it in window for held in it), count))
        begin += count
    return due, own


def test_dropped_rollouts_are_named_beside_another_target():
    groups = named(DUE, LACKING, ranks=RANKS, idle=1)
    assert groups == [{"another-target", "silent-truncation"}]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 12])
def test_windows_that_lack_rollouts_are_never_explained_without_that(steps, seed):
    groups = named(*dropping(steps, seed), ranks=RANKS, idle=0)
    assert not groups or "silent-truncation" in groups[0]


@pytest.mark.parametrize("target", [8, 12, 14, 15, 17, 24])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("name", STREAMS)
def test_another_target_of_one_stream_drops_nothing(name, carried, target):
    held = stream(name)
    due, own = cut(held, TARGET, carried=carried), cut(held, target, carried=carried)
    groups = named(due, own)
    assert due == own or "another-target" in groups[0]
    assert not any("silent-truncation" in group for group in groups)


def test_a_window_that_has_more_lacks_nothing():
    more = [(18, 4), (23, 6), *LACKING[2:]]
    groups = named(DUE, more, ranks=RANKS, idle=1)
    # In fewer rollouts than are due another rule may see it, and other data beside it.
    assert not any({"silent-truncation"} < group - {"data-or-seed"} for group in groups)
