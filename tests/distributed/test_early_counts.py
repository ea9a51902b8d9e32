"""Counts that travel with the step before them, beside a second engine and under sequence parallelism.

What one engine alone does with them stands in test_host_collectives.py.
"""

import re
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from ds_parity.errors import RankDesyncError
from ds_parity.parity.running import weights
from tests.distributed.cells import config
from tests.distributed.engines import (
    Batch,
    build,
    exchanges_of,
    forward,
    from_all,
    ledger_of,
    sums_of,
    until_made,
)
from tests.distributed.sequence import loss_of, remembering
from tests.distributed.sets import at_length_on_four_ranks, by_length, either, on_four_ranks, on_two_ranks

pytestmark = pytest.mark.ranks

MANY = 16  # micro-batches that a thread makes ahead, more than any look-ahead here
EARLY = {"neither": (0, 0), "both": (MANY, MANY), "actor": (MANY, 0), "critic": (0, MANY)}
"""Which of two engines announces its passes early, to what their threads make ahead."""
PAIRS = {
    **{f"1 and 2, {which}": ((1, 2), which) for which in EARLY},
    **{f"3 and 0, {which}": ((3, 0), which) for which in ("neither", "both")},
}
"""The ZeRO stages of actor and critic, and which announces early."""
SILENT = 1  # a stage that is silent inside windows, where 3 is not


@dataclass
class Own(Batch):
    """A micro-batch with inputs; without them its pass is idle, and runs another one's."""

    inputs: dict | None = None


def some(*seeds):
    """Micro-batches of one rollout each, with tokens that differ."""
    return [Own(seed, 1, 0, 1 + seed % 4, {"seed": seed}) for seed in seeds]


def nothing(passes):
    """Micro-batches of a rank that has no data for a while."""
    return [Own(0, 0, 0, 0, None)] * passes


def uneven(second):
    """A stream in whose third window the second rank, or group of ranks, has nothing, and which ends there earlier."""
    if not second:
        return some(*range(44))
    return [*some(*range(50, 58)), *nothing(8), *some(*range(60, 66)), *nothing(3)]


class Turns:
    """The passes of one engine, of which each turn runs one, and what they come to."""

    def __init__(self, engine, stream, prefetch, loss=forward, beside=lambda _: None, **options):
        """Begin them; nothing is read before the first turn. Beside each pass something else may be run."""
        self.engine, self.said, self._loss, self._beside = engine, "", loss, beside
        self._passes = engine.passes(stream, prefetch=prefetch, **{"skip_idle": False, **options})
        self._steps, self._collectives, self._before = [], [], self._costs()

    def _costs(self):
        return exchanges_of(self.engine), sums_of(self.engine)

    def run(self):
        """Run one pass; returns whether there was one."""
        try:
            one = next(self._passes, None)
        except (ValueError, RankDesyncError) as error:
            # Engines are numbered through, and another run has others.
            self.said, one = re.sub(r"engine \d+", "an engine", f"{type(error).__name__}: {error}"), None
        if one is None:
            return False
        self._beside(one)
        self.engine.backward(self._loss(self.engine, one.seed))
        if self.engine.window.closed:
            until_made(self.engine)
        self.engine.step()
        if self.engine.window.passes == 0:
            now = self._costs()
            self._collectives.append([now[0] - self._before[0], now[1] - self._before[1]])
            self._before = now
            self._steps.append(self.engine.last_step.model_dump())
        return True

    def leave(self):
        """End them here, as a loop does that is left."""
        self._passes.close()

    def outcome(self):
        """What every rank has: steps, weights, what was raised; and the exchanges and other collectives of windows."""
        last = self.engine.last_step.model_dump()
        own = {"steps": self._steps, "last": last, "weights": weights.vector(self.engine.module).tolist()}
        return {"found": from_all({**own, "said": self.said}), "collectives": self._collectives}


def alternate(*turns):
    """Run one pass of each in turn, until all have ended; returns what each came to."""
    running = list(turns)
    while running:
        running = [one for one in running if one.run()]
    return [one.outcome() for one in turns]


def assert_one_exchange(collectives):
    """In front of the first window; all others have one collective, which sums loss and metrics too."""
    assert len(collectives) >= 4
    assert [exchanged for exchanged, _ in collectives] == [1] + [0] * (len(collectives) - 1)
    assert {others for _, others in collectives[1:]} == {1}


def assert_more_exchanges(collectives):
    """Counts did not travel early."""
    assert sum(exchanged for exchanged, _ in collectives) >= len(collectives) / 2


def _pair(stages, ahead=8, **keywords):
    actor = build(config(stages[0], passes=8, lookahead=ahead, loss_weight="token"), **keywords)
    return actor, build(config(stages[1], passes=6, lookahead=6), **keywords)


@on_two_ranks
def side_by_side(folder):
    """An actor and a critic that take turns; one rank has no data for a while, ends earlier, and has none for one."""
    results = {}
    for case, (stages, which) in PAIRS.items():
        actor, critic = _pair(stages)
        values = [] if dist.get_rank() else some(*range(30))
        made = EARLY[which]
        results[case] = alternate(
            Turns(actor, uneven(dist.get_rank()), made[0]), Turns(critic, values, made[1], idle=some(7)[0])
        )
    return results


@pytest.mark.parametrize("case", [case for case, (_, which) in PAIRS.items() if which != "neither"])
def test_two_engines_take_the_same_steps_whichever_of_them_announces_early(two_ranks, case):
    """And each that does costs one collective a window, whatever the other one does."""
    found, which = two_ranks.of(side_by_side), PAIRS[case][1]
    without = found[case.replace(which, "neither")]
    for number, (late, early) in enumerate(zip(without, found[case], strict=True)):
        assert early["found"] == late["found"]
        assert_more_exchanges(late["collectives"])
        (assert_one_exchange if EARLY[which][number] else assert_more_exchanges)(early["collectives"])


@on_two_ranks
def one_inside_the_other(folder):
    """A critic whose passes wait for their counts behind the backward, inside the actor's, known early or not."""
    results = {}
    for made in (0, MANY):
        actor, critic = _pair((2, 1))
        pending = []

        def value(one, critic=critic, pending=pending):
            critic.backward(forward(critic, one.seed + 1), rollouts=one.rollouts, tokens=one.tokens)
            critic.step()
            pending.append(critic.window.rollouts)

        [outcome] = alternate(Turns(actor, uneven(dist.get_rank()), made, beside=value))
        critic.finish()
        inside = from_all([pending, critic.last_step.model_dump(), weights.vector(critic.module).tolist()])
        results[made] = {**outcome, "inside": inside}
    return results


def test_an_engine_that_a_loop_counts_for_goes_on_inside_passes_that_are_announced_early(two_ranks):
    late, early = two_ranks.of(one_inside_the_other).values()
    assert early["found"] == late["found"]
    assert early["inside"] == late["inside"]
    assert_one_exchange(early["collectives"])


@on_two_ranks
def one_breaks(folder):
    """An actor whose stream raises on one rank behind its second window; the critic goes on to its end."""

    def breaks():
        yield from some(*range(10))
        if dist.get_rank():
            raise ValueError("no more of them")
        yield from some(*range(10, 40))

    results = {}
    for which, made in (("neither", 0), ("both", MANY)):
        actor, critic = _pair((1, 2), ahead=4)
        values = some(*range(30 - 9 * dist.get_rank()))
        results[which] = alternate(Turns(actor, breaks(), made), Turns(critic, values, made))
    return results


def test_what_the_stream_of_one_engine_raises_ends_this_one_alone(two_ranks):
    found = two_ranks.of(one_breaks)
    actor, critic = found["both"]
    assert [actor["found"], critic["found"]] == [one["found"] for one in found["neither"]]
    assert [len(one["steps"]) for one in actor["found"]] == [2, 2]
    assert "no more of them" in actor["found"][0]["said"]
    assert actor["found"][1]["said"] == "ValueError: no more of them"
    assert [one["said"] for one in critic["found"]] == ["", ""]
    assert len(critic["collectives"]) > 5


@on_two_ranks
def left_behind_a_step(folder):
    """passes() that every rank leaves where the next passes are announced already; then another stream."""
    results = {}
    for made in (0, MANY):
        engine = build(config(1, passes=8, lookahead=4))
        turns = Turns(engine, some(*range(40)), made)
        for _ in range(8):
            turns.run()
        turns.leave()
        again = Turns(engine, some(*range(100, 120 - 7 * dist.get_rank())), made)
        [outcome] = alternate(again)
        results[made] = {**outcome, "rollouts": ledger_of(engine).rollouts}
    return results


def test_passes_that_were_announced_and_left_are_counted_in_no_window(two_ranks):
    late, early = two_ranks.of(left_behind_a_step).values()
    assert early["found"] == late["found"]
    assert early["rollouts"] == late["rollouts"] == 16 + 33


def shared_on(stage):
    """Two groups of two ranks that share micro-batches; a group has no data for a while, and ends earlier."""
    group, results = dist.get_rank() // 2, {}
    for case, made in (("late", 0), ("early", MANY), ("but for one rank", MANY * (dist.get_rank() != 3))):
        with remembering() as mpu:
            engine = build(config(stage, passes=8, lookahead=8, loss_weight="token"), mpu=mpu)
            [results[case]] = alternate(Turns(engine, uneven(group), made, loss_of, skip_idle=True))
            engine.destroy()
    return results


@on_four_ranks
def shared_micro_batches(folder):
    return shared_on(SILENT)


@at_length_on_four_ranks
def shared_micro_batches_of_stage_3(folder):
    return shared_on(3)


@pytest.mark.parametrize("stage", by_length((SILENT,), (3,), "four_ranks"))
class TestRanksThatShareMicroBatches:
    @pytest.fixture
    def found(self, request, stage):
        tasks = shared_micro_batches, shared_micro_batches_of_stage_3
        return either(request, *tasks, seldom=stage != SILENT, fixture="four_ranks")

    def test_take_the_same_steps_where_counts_travel_early(self, found):
        assert found["early"]["found"] == found["late"]["found"]
        assert_more_exchanges(found["late"]["collectives"])
        assert_one_exchange(found["early"]["collectives"])

    def test_wait_for_counts_where_one_of_them_does_not_know_its_passes(self, found):
        assert found["but for one rank"] == found["late"]


@on_four_ranks
def two_engines_over_shared_ones(folder):
    """An actor and a critic of such ranks; one of the groups has no values."""
    group, results = dist.get_rank() // 2, {}
    for which, made in (("neither", 0), ("both", MANY)):
        with remembering() as mpu:
            actor, critic = _pair((1, 2), mpu=mpu)
            values = [] if group else some(*range(30))
            results[which] = alternate(
                Turns(actor, uneven(group), made, loss_of), Turns(critic, values, made, loss_of, idle=some(7)[0])
            )
            actor.destroy()
            critic.destroy()
    return results


def test_two_engines_of_such_ranks_take_the_same_steps_too(four_ranks):
    found = four_ranks.of(two_engines_over_shared_ones)
    for late, early in zip(found["neither"], found["both"], strict=True):
        assert early["found"] == late["found"]
        assert_one_exchange(early["collectives"])


@on_four_ranks
def peers_that_differ(folder):
    """Ranks that share micro-batches, of which one counts another number of tokens in the second window."""
    results = {}
    for made in (0, MANY):
        with remembering() as mpu:
            engine = build(config(1, passes=8, lookahead=4, loss_weight="token"), mpu=mpu)
            stream = some(*range(16))
            stream[5] = Own(5, 1, 0, 2 + (dist.get_rank() == 3), {"seed": 5})
            turns = Turns(engine, stream, made, loss_of)
            [results[made]] = alternate(turns)
            engine.destroy()
    return results


def test_counts_that_differ_between_ranks_of_one_micro_batch_are_refused_as_they_are_late(four_ranks):
    late, early = four_ranks.of(peers_that_differ).values()
    assert early["found"] == late["found"]
    assert [len(one["steps"]) for one in early["found"]] == [1] * 4
    for one in early["found"]:
        assert one["said"].startswith("RankDesyncError: ranks that share a micro-batch passed different counts: rank 2")
