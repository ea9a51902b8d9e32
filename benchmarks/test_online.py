"""Online training: rollouts that go to whichever rank asks, beside PipelineRL's quota for each rank, in one run."""

import statistics

import pytest

from benchmarks.results import Section, divided, shown
from benchmarks.setups import launched

BLOCKS = 21
SAID = """`tools/train_online.py`, 2 ranks, one actor. The rule changes every {} windows of 128 rollouts, so both
meet the same load: the queue gives what has arrived to whichever rank asks, or each rank takes 64 rollouts of a window
and runs idle passes until the others have theirs (PipelineRL). A rank waits while it has nothing to train on, idle
passes included.{}"""
REST = 0.5
"""Seconds that the slow actor rests behind 128 rollouts."""
SLOW = f" The actor rests {REST:g} s behind every 128 rollouts (`--rest {REST:g}`), so it is slower than the ranks."
# Name of a section to its title, what else is said, the windows of a block, and the actor's rest.
RUNS = {
    "online": ("Rollouts a second, online", "", 20, 0.0),
    "online-slow": ("Rollouts a second, online, with a slow actor", SLOW, 8, REST),
}


@pytest.mark.parametrize("name", RUNS)
def test_rollouts_a_second_beside_quotas(benchmark, tmp_path, results, name):
    title, more, block, rest = RUNS[name]
    calls = {"online": {"folder": str(tmp_path / "run"), "blocks": BLOCKS, "block": block, "rest": rest}}
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.online:measure", calls), rounds=1)
    ranks = measured["online"]
    kept = list(zip(*(blocks[1:] for blocks in ranks), strict=True))  # the first has the actor's start in it
    rates, waits = {}, {}
    for quota in (False, True):
        own = [row for row in kept if row[0][0] is quota]
        rates[quota] = [rank[2] / rank[1] for rank, *_ in own]
        waits[quota] = [statistics.fmean(rank[3] / rank[1] for rank in row) for row in own]
    header = ("", "what has arrived", "a quota for each rank")
    rows = [
        ("share of the time in which a rank waits", shown(waits[False]), shown(waits[True])),
        ("rollouts a second, what has arrived / quota", shown(divided(rates[False], rates[True])), "1"),
    ]
    results(Section(name, title, SAID.format(block, more), header, rows))
    assert len(rates[False]) == len(rates[True]) == (BLOCKS - 1) // 2
