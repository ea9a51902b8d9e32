"""2,000 windows: memory is flat, and nothing is kept of what is over."""

from itertools import product

import pytest

WINDOWS, EARLY = 2000, 200


@pytest.mark.parametrize(
    ("stage", "drive"), [*product((0, 1, 2, 3), ("loop",)), *product((1, 3), ("passes", "ahead", "bare"))]
)
def test_memory_after_2000_windows_is_what_it_was_after_200(forks, stage, drive):
    """The bare engine beside ours: what grows there is DeepSpeed's."""
    told = forks.run("tests.hard.soak:soak", 2, 400, stage=stage, drive=drive, windows=WINDOWS, early=EARLY)
    assert [one.how for one in told] == ["returned"] * 2, told
    for one in told:
        first, last = one.value["first"], one.value["last"]
        grown = {name: last[name] - first[name] for name in first}
        print(f"\nZeRO {stage}, {drive}: {grown}, by type {one.value['grown']}")
        assert grown["objects"] < (WINDOWS - EARLY) // 10, one.value["grown"]
        assert grown["blocks"] < WINDOWS - EARLY
        assert grown["resident"] < 16 * 2**20
