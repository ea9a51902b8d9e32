"""Ranks that part, on real ranks by the hundred: every one is told inside the limit, and none is left behind."""

from itertools import product
from random import Random

import pytest

from tests.hard.parting import CHANGES

LIMIT = 5.0  # seconds that ranks wait for each other
# A process that ends takes its time, and so do ranks that share two cores.
SLACK = 20.0
OWN = {
    "raises": "ValueError: this rank broke",
    "stream raises": "ValueError: the stream broke",
    "refuses": "WindowError: ",
}
EXITS = ("exits", "stream exits")
LOOP = ("raises", "exits", "finishes", "leaves", "skips", "refuses")
PASSES = ("raises", "exits", "finishes", "leaves", "refuses", "stream raises", "stream exits", "looks ahead")


def cases():
    """Every kind of parting on every stage, driven in every way that has it; rank, pass and number of ranks at random."""
    random = Random(0)
    for stage, (drive, kinds) in product((0, 1, 2, 3), (("loop", LOOP), ("passes", PASSES), ("ahead", PASSES))):
        for kind in kinds:
            ranks = random.choice((2, 2, 4))
            yield kind, stage, drive, ranks, random.randrange(ranks), random.randrange(1, 6)


def desync(outcome):
    return outcome.error.startswith("RankDesyncError: ")


def in_time(outcome):
    return outcome.how != "hung" and outcome.seconds < LIMIT + SLACK


@pytest.mark.parametrize(("kind", "stage", "drive", "ranks", "odd", "at"), cases())
def test_where_one_rank_parts_the_others_raise_inside_the_limit(forks, kind, stage, drive, ranks, odd, at):
    told = forks.run(
        "tests.hard.parting:run", ranks, 90, kind=kind, stage=stage, drive=drive, odd=odd, at=at, limit=LIMIT
    )
    print("\n" + "\n".join(f"{one.how} {one.seconds:.1f} s: {str(one.value)[:200]}" for one in told))
    assert all(in_time(one) for one in told), told
    parted, *_ = told[odd : odd + 1]
    assert all(desync(one) for rank, one in enumerate(told) if rank != odd), told
    if kind in OWN:
        assert parted.error.startswith(OWN[kind])
    elif kind in EXITS:
        assert (parted.how, parted.value) == ("exited", 0)
    else:
        assert parted.how == "returned" if kind == "leaves" else desync(parted)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_different_configurations_are_told_so_before_an_engine_is_built(forks, stage, ranks):
    odd = stage % ranks
    told = forks.run("tests.hard.parting:configurations", ranks, 120, stage=stage, odd=odd)
    assert [one.how for one in told] == ["returned"] * ranks, told
    for rank, one in enumerate(told):
        assert set(one.value) == set(CHANGES)
        for change, (message, seconds) in one.value.items():
            fault, says = (
                "fault" in change,
                f"RankDesyncError: this rank stops because others did: rank {odd} raised ConfigError",
            )
            start = "RankDesyncError: ranks differ in " if not fault else "ConfigError: " if rank == odd else says
            assert message.startswith(start), change
            assert seconds < SLACK


@pytest.mark.parametrize(("stage", "drive"), product((0, 1, 2, 3), ("loop", "passes", "ahead")))
def test_ranks_that_do_not_part_train_whatever_they_hold(forks, stage, drive):
    told = forks.run("tests.hard.parting:run", 4, 60, kind="trains", stage=stage, drive=drive, odd=0, at=0, limit=LIMIT)
    assert {(one.how, one.value) for one in told} == {("returned", 3)}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("drive", ["loop", "passes", "ahead"])
def test_a_silent_rank_that_lives_on_is_waited_for_as_long_as_the_limit(forks, stage, drive):
    """On ZeRO 3 a forward waits for it, as long as DeepSpeed's process group does.

    So does the backward on ZeRO 2, where its counts were told before it fell silent: `passes` tells them before the pass.
    """
    told = forks.run("tests.hard.parting:run", 2, 90, kind="sleeps", stage=stage, drive=drive, odd=1, at=2, limit=LIMIT)
    if stage == 2 and drive != "loop":
        assert [(one.how, one.value) for one in told] == [("returned", 2)] * 2
        return
    assert desync(told[0])
    assert LIMIT <= told[0].seconds < LIMIT + SLACK


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("doing", ["saves", "loads"])
def test_where_one_rank_breaks_the_others_neither_save_nor_load_alone(forks, stage, doing, tmp_path):
    """And `latest` names the checkpoint that all ranks have written."""
    arguments = {"stage": stage, "odd": 1, "folder": str(tmp_path), "doing": doing}
    first, second = forks.run("tests.hard.parting:checkpoints", 2, 90, **arguments)
    assert desync(first), first
    assert in_time(first)
    assert doing == "loads" or "in save_checkpoint()" in first.error
    assert second.error == "ValueError: this rank broke"
    assert (tmp_path / "latest").read_text() == "first"
