"""Planning beside sorting, whose growth it should have, and its passes beside those of the quota that trainers give a rank."""

import time

import numpy as np
import pytest

from ds_parity.parity.rollouts import load_rollouts
from ds_parity.planning import Rollout, plan

LIMIT = 8192


def drawn(count):
    """Rollouts of 1 to 8,192 tokens, most of a few hundred, eight a prompt."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 0.8, count).astype(int), 1, LIMIT)
    return [Rollout(str(index // 8), range(length), 1) for index, length in enumerate(lengths.tolist())]


def seconds(action):
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("window", [1, 100], ids=["one window", "a hundred windows"])
@pytest.mark.parametrize("count", [10_000, 100_000, 1_000_000])
def test_plan_on_1024_ranks(benchmark, count, window):
    rollouts = drawn(count)
    options = {"dp_world_size": 1024, "target": count // window, "max_tokens": LIMIT}
    planned = benchmark.pedantic(lambda: plan(rollouts, **options), rounds=3)
    sorting = min(seconds(lambda: sorted(rollouts, key=lambda rollout: len(rollout.tokens)))[0] for _ in range(3))
    ratio = benchmark.stats.stats.median / sorting
    bound = planned.passes / planned.fewest_passes()
    benchmark.extra_info |= {"of sorting": ratio, "of the fewest passes": bound}
    print(f"\n{count:,} rollouts: {ratio:.1f} times sorting them; {bound:.3f} of the lower bound of passes")
    assert bound <= 1.02


def quota(rollouts, ranks, target, max_tokens):
    """Passes and idle passes where each rank has its fixed share of a window, packed as it came, and dummies fill up."""
    passes = idle = 0
    for start in range(0, len(rollouts) // target * target, target):
        mine = [own_passes(rollouts[start + rank : start + target : ranks], max_tokens) for rank in range(ranks)]
        passes += max(mine)
        idle += max(mine) * ranks - sum(mine)
    return passes, idle


def own_passes(rollouts, max_tokens):
    count = held = 0
    for rollout in rollouts:
        if not count or held + len(rollout.tokens) > max_tokens:
            count, held = count + 1, 0
        held += len(rollout.tokens)
    return count


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fewer_passes_and_fewer_idle_ones_than_a_quota_a_rank(benchmark, ranks):
    rollouts = load_rollouts()
    planned = benchmark(lambda: plan(rollouts, dp_world_size=ranks, target=256, max_tokens=2048))
    passes, idle = quota(rollouts, ranks, 256, 2048)
    print(
        f"\n{ranks} ranks: {planned.passes} passes beside {passes} of the quota, "
        f"{planned.idle_passes} idle ones beside {idle}"
    )
    assert planned.passes < passes
    assert planned.idle_passes < idle
