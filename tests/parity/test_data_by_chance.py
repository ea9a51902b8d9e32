"""Counts of tokens that other data have again: what a few sizes of windows give by chance is no repeated position."""

import random
from collections import Counter

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace import Header, StepRecord, Trace

HEADER = Header(scenario="toy", seed=1, versions={}, device="cpu", ranks=1, config_hash="ab", engine="other")
COUNTS = {"passes": 1, "idle_passes": 0, "rollouts": 16, "prompts": 4}


def names(tokens, first, seed):
    """What is named where losses and norms are others from a step on; the tokens of both sides."""
    draw, sides = random.Random(seed), ([], [])
    for n in range(len(tokens[0])):
        off = draw.uniform(-0.3, 0.3) if n >= first else 0.0
        for side, own, apart in zip(sides, tokens, (0.0, off), strict=True):
            held = {"tokens": own[n], "total": float(own[n])}
            side.append(
                StepRecord(
                    step=n + 1, loss=2 - n / 50 + apart, lr=(1e-3,), grad_norm=1 + n / 50 + apart, **COUNTS, **held
                )
            )
    a, b = (Trace(HEADER, tuple(side)) for side in sides)
    return {cause.name for cause in diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes}


@pytest.mark.parametrize(("steps", "first"), [(14, 9), (12, 9), (30, 26), (40, 36)])
def test_other_data_of_three_sizes_have_the_sizes_of_earlier_windows_by_chance(steps, first):
    found = Counter()
    for seed in range(60):
        draw = random.Random(seed)
        a, b = ([draw.choice((512, 1024, 2048)) for _ in range(steps)] for _ in range(2))
        found.update(names((a, [*a[:first], *b[first:]]), first, seed))
    assert found["resume-repeats-data"] == 0


@pytest.mark.parametrize(("steps", "first", "start"), [(14, 9, 2), (12, 9, 0), (30, 26, 5)])
def test_windows_that_begin_again_have_sizes_that_chance_does_not_give(steps, first, start):
    draw = random.Random(7)
    a = [draw.randrange(400, 2000) for _ in range(steps)]
    assert names((a, [*a[:first], *a[start : start + steps - first]]), first, 7) == {"resume-repeats-data"}


@pytest.mark.parametrize("start", [0, 3, 6])
def test_two_windows_of_sizes_that_no_others_have_are_of_some_two_of_eight_earlier_ones_by_chance(start):
    """A pair of ten windows that were all unlike may be alike once in 46 pairs, and there are eight places to begin."""
    draw = random.Random(7)
    a = [draw.randrange(400, 2000) for _ in range(10)]
    assert "resume-repeats-data" not in names((a, [*a[:8], *a[start : start + 2]]), 8, 7)
