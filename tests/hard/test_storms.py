"""fp16 overflow storms: windows that overflow in a row skip their steps and move nothing else."""

from random import Random

import pytest

STAGES = (0, 1, 2, 3)
# A storm before the first step, in the middle, at the end; alternating; and random weather.
PATTERNS = [
    "xxxx...x",
    "..xxxxxx..",
    "...xxx",
    ".x.x.x.x.x.",
    *["".join(Random(n).choices(".x", k=14)) for n in range(3)],
]
FP16 = [
    {"initial_scale_power": 16, "hysteresis": 1},
    {"initial_scale_power": 16, "hysteresis": 2},
    {"initial_scale_power": 16, "hysteresis": 3, "consecutive_hysteresis": True},
]
AT_MINIMUM = "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


def runs(forks, function, ranks, **arguments):
    told = forks.run(function, ranks, 200, **arguments)
    assert [one.how for one in told] == ["returned"] * ranks, told
    return [one.value for one in told]


def holds(found, pattern):
    """What is promised of a storm, whatever the engine."""
    ours, rates = found["ours"], iter(found["rates"])
    applied, lr = 0, None
    for number, (letter, line) in enumerate(zip(pattern, ours, strict=True), start=1):
        assert line["applied"] == (letter == ".")
        applied += line["applied"]
        # Calls of the optimizer, those that were skipped, and a scheduler that stands one behind the steps taken.
        assert line["clocks"] == [number, number - applied, applied - 1]
        lr = next(rates) if line["applied"] else lr
        assert lr is None or line["lr"] == lr
        if letter == "x" and number > 1:
            assert line["weights"] == ours[number - 2]["weights"]
    assert found["off"] < 1e-3


@pytest.mark.parametrize("fp16", FP16, ids=lambda keys: f"hysteresis-{keys['hysteresis']}")
@pytest.mark.parametrize("stage", STAGES)
def test_a_storm_is_survived_as_the_bare_engine_survives_it_bit_for_bit(forks, stage, fp16):
    """Scales, clocks, LR and weights of every window, on both ranks alike."""
    first, second = runs(forks, "tests.hard.storms:storms", 2, stage=stage, kind="fp16", patterns=PATTERNS, fp16=fp16)
    assert first == second
    for pattern, found in first.items():
        holds(found, pattern)
        assert found["ours"] == found["bare"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_storm_under_autocast_brings_the_scale_down_and_skips_alike(forks, stage):
    first, second = runs(forks, "tests.hard.storms:storms", 2, stage=stage, kind="autocast", patterns=PATTERNS, fp16={})
    assert first == second
    for pattern, found in first.items():
        holds(found, pattern)
        scales = [line["scale"] for line in found["ours"]]
        assert scales == [65536.0 / 2 ** pattern[: n + 1].count("x") for n in range(len(pattern))]


@pytest.mark.parametrize("stage", STAGES)
def test_at_the_smallest_scale_every_rank_raises_what_bare_deepspeed_does_or_goes_on_as_it_does(forks, stage):
    fp16 = {"initial_scale_power": 3, "hysteresis": 2, "min_loss_scale": 1}
    by_rank = runs(forks, "tests.hard.storms:minimum", 2, stage=stage, fp16=fp16)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0]["ours"] == by_rank[0]["bare"] == (["", 1.0] if stage == 0 else [AT_MINIMUM, 4])
