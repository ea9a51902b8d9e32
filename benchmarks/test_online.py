"""Online training: rollouts that go to whichever rank asks, beside PipelineRL's quota for each rank, in one run."""

import statistics

from benchmarks.results import Section, divided, shown
from benchmarks.setups import launched

BLOCKS, BLOCK = 15, 20
ACTORS = {"one actor that keeps up": (), "an actor that is too slow": ("--batch", "1", "--room", "4")}
SAID = f"""`tools/train_online.py` on 2 ranks. The rule changes every {BLOCK} windows of 128 rollouts, so that both
meet the same load: the queue gives what has arrived to whichever rank asks, or each rank takes 64 rollouts of a window
and runs idle passes until the others have theirs (PipelineRL). A rank waits while it has nothing to train on, idle
passes included. The slow actor samples one prompt at a time."""


def test_rollouts_a_second_beside_quotas(benchmark, tmp_path, results):
    calls = {
        name: {"folder": str(tmp_path / str(number)), "blocks": BLOCKS, "block": BLOCK, "options": options}
        for number, (name, options) in enumerate(ACTORS.items())
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.online:measure", calls), rounds=1)
    rows = [(name, *_cells(measured[name])) for name in ACTORS]
    header = ("", "waits, what has arrived", "waits, quotas", "rollouts a second, what has arrived / quotas")
    results(Section("online", "Rollouts a second, online", SAID, header, rows))


def _cells(ranks):
    """The shares of waiting by both rules, and the ratio of rollouts a second, of blocks beside each other."""
    kept = list(zip(*(blocks[1:] for blocks in ranks), strict=True))  # the first has the actor's start in it
    assert len(kept) == BLOCKS - 1
    rates, waits = {}, {}
    for quota in (False, True):
        own = [row for row in kept if row[0][0] is quota]
        rates[quota] = [rank[2] / rank[1] for rank, *_ in own]
        waits[quota] = [statistics.fmean(rank[3] / rank[1] for rank in row) for row in own]
    return shown(waits[False]), shown(waits[True]), shown(divided(rates[False], rates[True]))
