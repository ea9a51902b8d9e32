"""Planning beside sorting, whose growth it should have, and its passes beside those of a fixed quota per rank."""

import time

import numpy as np

from benchmarks.results import Section, shown
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.planning import Cost, Rollout, plan

LIMIT = 8192


def drawn(count):
    """Rollouts of 1 to 8,192 tokens, most of a few hundred, eight a prompt."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 0.8, count).astype(int), 1, LIMIT)
    return [Rollout(str(index // 8), range(length), 1) for index, length in enumerate(lengths.tolist())]


def seconds(action):
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def test_plan_on_1024_ranks(benchmark, results):
    """It comes to within 2 % of the lower bound of passes."""
    rows = []

    def measure():
        for count in (10_000, 100_000, 1_000_000):
            rollouts = drawn(count)
            rows.extend(_planned(rollouts, windows) for windows in (1, 100))

    benchmark.pedantic(measure, rounds=1)
    said = f"""1,024 ranks, micro-batches of at most {LIMIT:,} tokens; beside `sorted` of the same rollouts by length,
in turn. Passes beside the fewest that any packing can have. By cost: with verl's workload."""
    header = ("rollouts", "windows", "time, plan / sorting", "by cost", "passes / lower bound", "by cost")
    results(Section("planning", "Planning", said, header, rows))


def _planned(rollouts, windows):
    options = {"dp_world_size": 1024, "target": len(rollouts) // windows, "max_tokens": LIMIT}
    ratios, bounds = [], []
    for cost in (None, Cost(24_576, 1)):
        ratios.append([])
        for _ in range(5):
            taken, planned = seconds(lambda cost=cost: plan(rollouts, **options, cost=cost))
            ratios[-1].append(taken / seconds(lambda: sorted(rollouts, key=lambda rollout: len(rollout.tokens)))[0])
        bounds.append(planned.passes / planned.fewest_passes())
        assert bounds[-1] <= 1.02
    times = (shown(one, 1) for one in ratios)
    return f"{len(rollouts):,}", str(windows), *times, *(f"{bound:.3f}" for bound in bounds)


def quota(rollouts, ranks, target, max_tokens):
    """Passes and idle passes where each rank has a fixed share of a window, packed as it came, and dummies fill up."""
    passes = idle = 0
    for start in range(0, len(rollouts) // target * target, target):
        mine = [own_passes(rollouts[start + rank : start + target : ranks], max_tokens) for rank in range(ranks)]
        passes += max(mine)
        idle += max(mine) * ranks - sum(mine)
    return passes, idle


def own_passes(rollouts, max_tokens):
    count = tokens = 0
    for rollout in rollouts:
        if not count or tokens + len(rollout.tokens) > max_tokens:
            count, tokens = count + 1, 0
        tokens += len(rollout.tokens)
    return count


def test_fewer_passes_and_fewer_idle_ones_than_a_quota_a_rank(benchmark, results):
    rollouts, rows = load_rollouts(), []

    def measure():
        for ranks in (2, 4, 8):
            planned = plan(rollouts, dp_world_size=ranks, target=256, max_tokens=2048)
            passes, idle = quota(rollouts, ranks, 256, 2048)
            counts = (planned.passes, passes, planned.idle_passes, idle)
            rows.append((str(ranks), *map(str, counts), f"{planned.passes / passes:.2f}"))
            assert planned.passes < passes
            assert planned.idle_passes < idle

    benchmark.pedantic(measure, rounds=1)
    said = """The bundled GSM8K rollouts in windows of 256 and micro-batches of 2,048 tokens, beside a fixed quota
for each rank, packed as it comes. Counted, not timed."""
    header = ("ranks", "passes, planned", "by quota", "idle passes, planned", "by quota", "passes, planned / quota")
    results(Section("quota", "Passes of a plan", said, header, rows))
