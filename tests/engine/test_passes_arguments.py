"""What `passes()` is given, and what its stream brings: refused with the way out, and told to the other ranks."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ds_parity
from ds_parity import MicroBatch
from ds_parity.config import MAX_LOOKAHEAD
from ds_parity.engine.passes import PassQueue
from ds_parity.engine.planned import PlansRead
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.engine.ranks.wire import GatheredPass
from ds_parity.errors import WindowError
from ds_parity.window import PassTotals, Weighting


@dataclass
class Batch:
    rollouts: int = 1
    prompts: int = 0
    tokens: int = 3


class Alone:
    """As much of a driver as reading needs: one rank, which hears from nobody but itself."""

    def __init__(self):
        self.refused, self.chunks, self.ranks = [], [], 1
        window, weighting = SimpleNamespace(passes=0), Weighting.configured("token", "mean", 8)
        self.ledger = SimpleNamespace(window=window, weighting=weighting)
        self.queue = self.data_group = None
        self.plans = PlansRead()
        self.engine = SimpleNamespace(zero_optimization_stage=lambda: 0)

    def look_ahead(self, passes):
        self.chunks.append(passes)

    def refuse(self, error):
        self.refused.append(error)

    def stops_here(self):
        return False

    def upcoming(self, _):
        return Upcoming(
            lambda announced, plan: SimpleNamespace(wait=lambda: self.answer(announced), proceed=lambda: None), 1
        )

    def answer(self, announced):
        return [GatheredPass(PassTotals.of([one.counts]), int(one.out_of_data), int(one.stuck)) for one in announced]


def refused(stream, lookahead=0, idle=None):
    driver = Alone()

    def first():
        queue = PassQueue(driver, stream, lookahead, idle)
        driver.queue = queue.upcoming
        return next(iter(queue))

    with pytest.raises(WindowError) as caught:
        first()
    assert driver.refused == [caught.value], "the other ranks wait for what this one announces"
    return str(caught.value)


@pytest.mark.parametrize("lookahead", [-1, True, False, "2", 2.0, 2.5, float("nan"), [2], MAX_LOOKAHEAD + 1, 10**9])
def test_a_look_ahead_is_a_whole_number_up_to_the_limit_as_the_key_is(lookahead):
    said = refused([Batch()], lookahead)
    assert said.startswith(f"passes(lookahead={lookahead!r}): must be a whole number from 0 to 4096")
    assert "leave it out" in said


@pytest.mark.parametrize(("lookahead", "chunk"), [(0, 1), (1, 1), (np.int64(3), 3), (MAX_LOOKAHEAD, 4096)])
def test_whole_numbers_up_to_the_limit_are_taken(lookahead, chunk):
    driver = Alone()
    PassQueue(driver, [], lookahead)
    assert (driver.chunks, driver.refused) == ([chunk], [])


@pytest.mark.parametrize("stream", [None, 3, Batch()])
def test_a_stream_that_can_not_be_iterated_is_refused_with_the_way_out(stream):
    said = refused(stream)
    assert said.startswith(f"passes() got a {type(stream).__name__}, which can't be iterated")
    assert "passes([])" in said


@dataclass
class OfRolloutsAlone:
    rollouts: int = 2


@pytest.mark.parametrize(
    ("item", "of", "lacks"),
    [
        ((torch.ones(2), torch.ones(2)), "a tuple of 2 ", "rollouts, prompts and tokens"),
        ([1, 2, 3], "a list of 3 ", "rollouts, prompts and tokens"),
        ({"x": 1, "rollouts": 2}, "a dict of 2 ", "rollouts, prompts and tokens"),
        (None, "a NoneType ", "rollouts, prompts and tokens"),
        (torch.ones(3), "a Tensor ", "rollouts, prompts and tokens"),
        (OfRolloutsAlone(), "a OfRolloutsAlone ", "prompts and tokens"),
    ],
)
@pytest.mark.parametrize("place", ["first", "second", "idle"])
def test_what_is_no_micro_batch_is_refused_by_its_type_with_what_it_lacks(item, of, lacks, place):
    """Any ordinary DataLoader yields such; each ended in an AttributeError."""
    if place == "idle" and item is None:
        pytest.skip("None is no stand-in, and says so")
    stream = {"first": [item], "second": [Batch(), item], "idle": []}[place]
    said = refused(stream, lookahead=2, idle=item if place == "idle" else None)
    assert f"{of}without {lacks}: " in said
    assert "MicroBatch(inputs, rollouts=..., prompts=..., tokens=...)" in said
    assert "backward(loss, rollouts=...)" in said


def test_a_count_of_the_stream_that_can_not_be_right_is_said_before_it_is_compared():
    assert "tokens is 'many'" in refused([Batch(), Batch(tokens="many")], lookahead=2)


def test_passes_behind_the_end_of_the_data_have_no_stand_in_until_they_are_run(monkeypatch):
    """A copy for each place of the look-ahead costs time in proportion to it."""
    made = []
    monkeypatch.setattr("ds_parity.engine.passes.stand_in", lambda batch: made.append(batch) or batch)
    driver = Alone()
    queue = PassQueue(driver, [Batch()], MAX_LOOKAHEAD)
    driver.queue = queue.upcoming
    next(iter(queue))
    assert made == []


def test_a_micro_batch_of_the_package_needs_no_more():
    driver = Alone()
    queue = PassQueue(driver, [ds_parity.MicroBatch({}, 1, 0, 3)], 0)
    driver.queue = queue.upcoming
    assert next(iter(queue)).tokens == 3


EMPTY = {
    "none": lambda: SimpleNamespace(inputs=None, rollouts=0, prompts=0, tokens=0),
    "no keys": lambda: SimpleNamespace(inputs={}, rollouts=0, prompts=0, tokens=0),
    "of the package": lambda: MicroBatch({}, 0, 0, 0),
}


@pytest.mark.parametrize("kind", EMPTY)
class TestAnItemThatHoldsNothingAndHasNoInputs:
    """Nothing could be run of it: engine(**inputs) ended in a TypeError."""

    def inputs(self, stream, lookahead, idle=None):
        driver = Alone()
        driver.ledger.window.passes = 1  # no window's first pass, so that every pass has an exchange of its own
        queue = PassQueue(driver, stream, lookahead, idle)
        driver.queue = queue.upcoming
        run = []
        for one in queue:
            run.append((one.inputs["x"], one.rollouts, one.idle))
            queue.upcoming.take(0)
        assert driver.refused == []
        return run

    @pytest.mark.parametrize("lookahead", [0, 1])
    def test_runs_the_smallest_micro_batch_so_far_in_an_idle_pass(self, kind, lookahead):
        stream = [MicroBatch({"x": 1}, 1, 0, 9), EMPTY[kind](), MicroBatch({"x": 2}, 1, 0, 5), EMPTY[kind]()]
        run = [(1, 1, False), (1, 0, True), (2, 1, False), (2, 0, True)]
        assert self.inputs(stream, lookahead) == run

    def test_runs_one_that_comes_later_where_that_was_read_ahead(self, kind):
        driver = Alone()
        queue = PassQueue(driver, [EMPTY[kind](), MicroBatch({"x": 1}, 1, 0, 9)], 2)
        driver.queue = queue.upcoming
        first = next(iter(queue))
        assert (first.inputs, first.rollouts, first.idle) == ({"x": 1}, 0, True)

    @pytest.mark.parametrize("lookahead", [0, 3])
    def test_runs_the_one_that_was_given_to_stand_in(self, kind, lookahead):
        assert self.inputs([EMPTY[kind]()], lookahead, MicroBatch({"x": 7}, 1, 0, 9))[0] == (7, 0, True)

    @pytest.mark.parametrize("lookahead", [0, 3])
    def test_is_refused_on_every_rank_where_nothing_else_was_read(self, kind, lookahead):
        driver = Alone()
        queue = PassQueue(driver, [EMPTY[kind]()], lookahead)
        driver.queue = queue.upcoming
        with pytest.raises(WindowError, match=r"1 of 1 ranks have no micro-batch .*idle=micro_batch"):
            next(iter(queue))

    def test_is_refused_where_it_is_to_stand_in_itself(self, kind):
        assert "passes(idle=...) got a micro-batch without inputs" in refused([Batch()], idle=EMPTY[kind]())


def test_an_item_that_holds_nothing_but_has_inputs_of_its_own_runs_these():
    driver = Alone()
    queue = PassQueue(driver, [MicroBatch({"x": 3}, 0, 0, 0)], 0)
    driver.queue = queue.upcoming
    assert next(iter(queue)).inputs == {"x": 3}
