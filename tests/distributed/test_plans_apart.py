"""Ranks that take their micro-batches from different plans, or one from another's part, are told so before a step."""

from dataclasses import replace
from itertools import chain, count

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from ds_parity.parity.running import weights
from tests.distributed.cells import config
from tests.distributed.engines import build, forward, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks, by_length, either, on_two_ranks

pytestmark = pytest.mark.ranks
# Plans are compared on the host, the same on each stage; on 0 in front of a backward, on 3 gradients are reduced in it.
OFTEN, SELDOM = (0,), (3,)
DIFFERENT = "RankDesyncError: ranks take their micro-batches from different plans (rank 0 begins "
WAYS = {
    "one by one": {},
    "ahead": {"lookahead": 3},
    "whole windows": {"lookahead": "window"},
    "in a thread": {"lookahead": 2, "prefetch": 4},
}


_SCENARIOS = count()


def _rollouts():
    """Rollouts of which no plan was made in this process before: what an earlier scenario has begun is known."""
    salt = next(_SCENARIOS)
    return [replace(one, tokens=(*one.tokens[:-1], salt)) for one in shorten(load_rollouts()[:32], 48)]


def _plan(rollouts, target):
    return ds_parity.plan(rollouts, dp_world_size=2, target=target, max_tokens=120)


def _own(rollouts, rank=None, target=8, **options):
    """What this rank reads of its plan; the plan may be another one on each rank."""
    own = dist.get_rank() if rank is None else rank
    yield from ds_parity.micro_batches(_plan(rollouts, target), own, **options)


def _answered(rollouts, rank):
    """Rollouts of the same lengths, in which one token differs by rank."""
    return [replace(one, tokens=(*one.tokens[:-2], rank, one.tokens[-1])) for one in rollouts]


def _ended(rollouts, rank):
    """Rollouts of one length that end alike, as where answers are filled up, and differ by rank in front of that."""
    return [
        replace(one, tokens=(1, *[number + 9 * rank] * 20, *[one.tokens[-1]] * 40), prompt_length=1)
        for number, one in enumerate(rollouts)
    ]


def _apart(name):
    """A stream of a plan that ranks do not share, by name."""
    rollouts, rank = _rollouts(), dist.get_rank()
    streams = {
        "a shard of each rank": lambda: _own(rollouts[rank::2]),
        "another order": lambda: _own(rollouts if rank else rollouts[8:] + rollouts[:8]),
        "another window to begin with": lambda: _own(rollouts, first_window=rank),
        "other answers of one length": lambda: _own(_answered(rollouts, rank)),
        "other rollouts with one end": lambda: _own(_ended(rollouts, rank)),
        "a short one of six": lambda: _chained(*(_turned(rollouts[n : n + 4], differ=n == 4) for n in range(0, 24, 4))),
        "the second plan": lambda: _chained(rollouts[:16], _turned(rollouts[16:], differ=True)),
        "one rank looks at its first": lambda: _peeked(_own(rollouts[rank::2])),
        "one rank logs its plan": lambda: _logged([rollouts[rank::2]]),
    }
    return streams[name]()


def _turned(rollouts, *, differ):
    return rollouts[::-1] if differ and dist.get_rank() else rollouts


def _peeked(stream):
    """The stream, of which rank 0 has read one before."""
    return stream if dist.get_rank() else chain([next(stream)], stream)


def _logged(parts):
    """Streams of plans of these; rank 0 reads each plan once more in front of its own micro-batches."""
    for part in parts:
        if not dist.get_rank():
            assert sum(batch.rollouts for batch in _own(part, target=min(8, len(part))))
        yield from _own(part, target=min(8, len(part)))


def _chained(*parts):
    return (batch for part in parts for batch in _own(part, target=min(8, len(part))))


APART = (
    "a shard of each rank",
    "another order",
    "another window to begin with",
    "other answers of one length",
    "other rollouts with one end",
    "a short one of six",
    "the second plan",
    "one rank looks at its first",
    "one rank logs its plan",
)


def _alike(name):
    """A stream of plans that all ranks share, by name, of which ranks may leave out what they like."""
    rollouts, rank = _rollouts(), dist.get_rank()
    both = [*_own(rollouts[:16]), *_own(rollouts[16:])]
    if name == "one begins the second plan earlier":
        return both[2:] if rank else both
    if name == "one reads all but the first of each":
        first = len(list(_own(rollouts[:16])))
        return both[1:first] + both[first + 1 :] if rank else both
    if name == "idle ones are left out":
        small = [*_own(rollouts[:1], target=1), *_own(rollouts[16:24]), *_own(rollouts[24:25], target=1)]
        return [one for one in small if not one.idle]
    if name == "in turns, the first of one left out":
        first, second = list(_own(rollouts[:16])), list(_own(rollouts[16:]))
        return [one for pair in zip(first, second, strict=False) for one in pair][rank:]
    if name == "one has none of a plan":
        return [ds_parity.MicroBatch(both[0].inputs, rollouts=1, tokens=3)] * 3 if rank else both
    if name == "one logs each, idle ones are left out":
        both = (one for one in _logged([rollouts[:1], rollouts[1:17], rollouts[17:25]]) if not one.idle)
    else:
        assert name == "both read both"
    return both


ALIKE = (
    "one begins the second plan earlier",
    "one reads all but the first of each",
    "one has none of a plan",
    "idle ones are left out",
    "in turns, the first of one left out",
    "one logs each, idle ones are left out",
    "both read both",
)


def _trained(engine, stream, **options):
    for _ in engine.passes(stream, **options):
        one_pass(engine, 1)


def _built(stage, **section):
    return build(config(stage, passes=8, exchange_timeout=20, **section))


def _plans_apart(stages):
    results = {}
    for stage in stages:
        for way, options in WAYS.items():
            for name in APART:
                engine = _built(stage)
                before = weights.vector(engine.module)
                said = refusal(lambda: _trained(engine, _apart(name), **options))  # noqa: B023  # called here
                kept = torch.equal(before, weights.vector(engine.module))
                results[f"{stage} {way} {name}"] = from_all([said, engine.global_steps, kept])
            engine = _built(stage)
            said = refusal(lambda: _trained(engine, _own(_rollouts(), 0), **options))  # noqa: B023  # called here
            results[f"{stage} {way} one part on both"] = from_all([said, engine.global_steps])
    return results


@on_two_ranks
def plans_apart(folder):
    """By stage, way of reading and plans: what is raised, the steps, and whether no weight has moved."""
    return _plans_apart(OFTEN)


@at_length_on_two_ranks
def plans_apart_at_length(folder):
    """The same on other stages."""
    return _plans_apart(SELDOM)


def _plans_alike(stages):
    results = {}
    for stage in stages:
        for way, options in WAYS.items():
            for name in ALIKE:
                engine = _built(stage)
                said = refusal(lambda: _trained(engine, _alike(name), **options))  # noqa: B023  # called here
                results[f"{stage} {way} {name}"] = from_all([said, engine.global_samples])
    return results


@on_two_ranks
def plans_alike(folder):
    """By stage, way of reading and streams: what is raised, and the rollouts of all steps."""
    engine = _built(2, boundary="caller")
    caller = from_all(refusal(lambda: _trained(engine, _apart("a shard of each rank"))))
    return _plans_alike(OFTEN) | {"caller": caller}


@at_length_on_two_ranks
def plans_alike_at_length(folder):
    """The same on other stages."""
    return _plans_alike(SELDOM)


def _found(request, stage, what):
    return either(request, plans_apart, plans_apart_at_length, seldom=stage in SELDOM)[f"{stage} {what}"]


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", by_length(OFTEN, SELDOM, "two_ranks"))
def test_different_plans_are_refused_on_every_rank(request, stage, way, name):
    for said, steps, kept in _found(request, stage, f"{way} {name}"):
        assert said.startswith(DIFFERENT)
        assert "Give plan() the same rollouts in the same order" in said
        assert kept == (steps == 0)
        assert steps == 0 or name in ("the second plan", "a short one of six")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", by_length(OFTEN, SELDOM, "two_ranks"))
def test_one_part_of_a_plan_on_both_ranks_is_refused(request, stage, way):
    (first, _), (second, _) = _found(request, stage, f"{way} one part on both")
    assert second.startswith("ConfigError: a micro-batch that passes() has read is that of data-parallel rank 0 in its")
    assert "dist.get_rank(engine.data_parallel_group)" in second
    assert first.startswith("RankDesyncError: ")
    assert "data-parallel rank 1 reads it" in first


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", by_length(OFTEN, SELDOM, "two_ranks"))
def test_ranks_may_leave_out_what_they_like_of_one_plan(request, stage, way, name):
    found = either(request, plans_alike, plans_alike_at_length, seldom=stage in SELDOM)
    (first, trained), second = found[f"{stage} {way} {name}"]
    assert (first, [first, trained]) == ("nothing was raised", second)
    assert trained > 0


def test_windows_that_the_caller_ends_need_one_plan_too(two_ranks):
    for said in two_ranks.of(plans_alike)["caller"]:
        assert said.startswith("RankDesyncError: ranks take their micro-batches from different plans")


def _ended_by_finish(folder):
    engine = _built(2, boundary="caller")
    before = weights.vector(engine.module)
    shard = _rollouts()[dist.get_rank() :: 2]

    def run():
        for _ in engine.passes(_own(shard)):
            engine.backward(forward(engine, 1))

    return [refusal(run), torch.equal(before, weights.vector(engine.module))]


def _stepped_once_more(folder):
    engine = _built(2)
    before = weights.vector(engine.module)
    said = [refusal(lambda: _trained(engine, _own(_rollouts()[dist.get_rank() :: 2]))), refusal(engine.step)]
    return [*said, torch.equal(before, weights.vector(engine.module))]


def _leaves_at_the_second_plan(engine, rollouts):
    """Break off where the first rank begins a second plan, of which the second rank has nothing."""
    first, second = list(_own(rollouts[:8])), list(_own(rollouts[8:16]))
    for _ in engine.passes(first if dist.get_rank() else first + second):
        if engine.global_steps == 1:
            break
        one_pass(engine, 1)


def _left_at_the_second_plan(folder):
    engine, rollouts = _built(2), _rollouts()

    def run():
        _leaves_at_the_second_plan(engine, rollouts)
        _trained(engine, _own(rollouts[16:24]))

    return [refusal(run), engine.global_steps]


def _loaded_where_the_second_plan_begins(folder):
    """One rank knows what was said of the second plan before it loads, and the other one does not wait for it."""
    engine, rollouts = _built(2), _rollouts()
    engine.save_checkpoint(f"{folder}-first")

    def run():
        _leaves_at_the_second_plan(engine, rollouts)
        engine.load_checkpoint(f"{folder}-first")
        _trained(engine, _own(rollouts[16:24]))

    return [refusal(run), engine.global_steps]


def _made_before_the_engine(folder):
    """Each rank leaves out all of a plan of which it has made the micro-batches."""
    rollouts = _rollouts()
    parts = [list(_own(rollouts[start : start + 8])) for start in (0, 8, 16)]
    engine = _built(2)
    return [refusal(lambda: _trained(engine, parts[dist.get_rank()] + parts[2])), engine.global_steps]


def _through_several_loops(folder):
    """One stream that is left behind each step; one rank leaves out its first two micro-batches."""
    engine, rollouts = _built(2), _rollouts()
    stream = _chained(rollouts[:12], rollouts[12:24], rollouts[24:])
    for _ in range(2 if dist.get_rank() else 0):
        next(stream)

    def run():
        for _ in range(2):
            for _ in engine.passes(stream, finish=False):
                one_pass(engine, 1)
                if engine.window.passes == 0:
                    break

    return [refusal(run), engine.global_steps]


def _another_epoch(folder):
    """Both ranks train one plan; then the first one trains it again, and the second one another."""
    engine, rollouts = _built(2), _rollouts()
    _trained(engine, _own(rollouts[:16]))
    return [refusal(lambda: _trained(engine, _own(_turned(rollouts[:16], differ=True)))), engine.global_steps]


def _another_plan_in_a_new_engine(folder):
    """Both ranks train one plan; then in a new engine the first one trains it again, and the second one another."""
    rollouts = _rollouts()
    _trained(_built(2), _own(rollouts[:16]))
    engine = _built(2)
    return [refusal(lambda: _trained(engine, _own(_turned(rollouts[:16], differ=True)))), engine.global_steps]


def _kept_of_an_engine(rollouts):
    """The micro-batches of three plans, which an engine has trained on and the loop keeps."""
    kept, engine = [[], [], []], _built(2)
    for number, start in enumerate((0, 8, 16)):
        for batch in engine.passes(_own(rollouts[start : start + 8])):
            kept[number].append(batch)
            one_pass(engine, 1)
    return kept


def _replayed_in_a_new_engine(folder):
    """Each rank replays another plan of them."""
    kept, engine = _kept_of_an_engine(_rollouts()), _built(2)
    return [refusal(lambda: _trained(engine, kept[dist.get_rank()] + kept[2])), engine.global_steps]


def _replayed_on_one_rank(folder):
    """The first rank replays two of them in front of a plan that both train."""
    rollouts = _rollouts()
    kept, engine = _kept_of_an_engine(rollouts), _built(2)
    own = () if dist.get_rank() else kept[0] + kept[1]
    return [refusal(lambda: _trained(engine, chain(own, _own(rollouts[24:])))), engine.global_steps]


def _replayed_and_other_plans(folder):
    """Behind what both replay, each rank has a plan of its own."""
    rollouts = _rollouts()
    kept, engine = _kept_of_an_engine(rollouts), _built(2)
    return [
        refusal(lambda: _trained(engine, chain(kept[0], _own(_turned(rollouts[24:], differ=True))))),
        engine.global_steps,
    ]


def _goes_on_in_a_new_engine(folder):
    """Each window has an engine of its own, and the stream goes on, up to the last but some."""
    stream, steps = _few(_rollouts()), 0

    def run():
        nonlocal steps
        for _ in range(5):
            engine = build(config(2, passes=3, exchange_timeout=20))
            for _ in engine.passes(stream, finish=False):
                one_pass(engine, 1)
                if engine.window.passes == 0:
                    break
            steps += engine.global_steps

    return [refusal(run), steps]


def _the_same_epochs(folder):
    """Both ranks train one plan three times; the first one logs it inside of its stream."""
    engine, rollouts = _built(2), _rollouts()

    def epochs():
        for _ in range(3):
            if dist.get_rank() == 0:
                assert list(_own(rollouts[:16]))
            yield from (one for one in _own(rollouts[:16]) if not one.idle)

    return [refusal(lambda: _trained(engine, epochs())), engine.global_steps]


def _few(rollouts):
    """A stream of plans of three rollouts, one a micro-batch, without the idle micro-batches."""
    for start in range(0, 30, 3):
        plan = ds_parity.plan(rollouts[start : start + 3], dp_world_size=2, target=3, max_tokens=48)
        yield from (one for one in ds_parity.micro_batches(plan, dist.get_rank()) if not one.idle)


def _goes_on_behind_a_load(folder):
    engine, stream = build(config(2, passes=3, exchange_timeout=20)), _few(_rollouts())

    def run():
        for _ in engine.passes(stream, finish=False):
            one_pass(engine, 1)
            if engine.window.passes == 0:
                break
        engine.save_checkpoint(f"{folder}-on")
        engine.load_checkpoint(f"{folder}-on")
        _trained(engine, stream)

    return [refusal(run), engine.global_steps]


def _goes_on_in_another_engine(folder):
    engines, stream = [build(config(2, passes=3, exchange_timeout=20)) for _ in range(2)], _few(_rollouts())

    def run():
        for number in range(6):
            engine = engines[number % 2]
            for _ in engine.passes(stream, finish=False):
                one_pass(engine, 1)
                if engine.window.passes == 0:
                    break

    return [refusal(run), sum(engine.global_steps for engine in engines)]


def _looked_at_inside(folder):
    """Each rank looks at a plan of its own before it takes the one that all share."""
    engine, rollouts = _built(2), _rollouts()

    def stream():
        assert list(_own(rollouts[16:][dist.get_rank() :: 2]))
        yield from _own(rollouts[:16])

    return [refusal(lambda: _trained(engine, stream())), engine.global_steps]


def _without_a_window(folder):
    """Behind a plan that both share, the second rank plans rollouts that fill no window."""
    engine, rollouts = _built(2), _rollouts()
    own = rollouts[16:21] if dist.get_rank() else rollouts[16:]
    return [refusal(lambda: _trained(engine, _chained(rollouts[:16], own))), engine.global_steps]


class _OfWorkers(torch.utils.data.IterableDataset):
    """One plan behind another, each of a few rollouts, without their idle micro-batches."""

    def __init__(self, plans, *, differ=False):
        self._plans, self._rollouts, self._rank = plans, _rollouts(), dist.get_rank()
        self._shift = self._rank if differ else 0

    def __iter__(self):
        for number in range(self._plans):
            start = number % 24
            few = [
                replace(one, tokens=(*one.tokens[:-1], number + self._shift))
                for one in self._rollouts[start : start + 3]
            ]
            plan = ds_parity.plan(few, dp_world_size=2, target=3, max_tokens=120)
            yield from (one for one in ds_parity.micro_batches(plan, self._rank) if not one.idle)


def _made_by_a_worker(folder):
    """More plans than are remembered, in a worker of a data loader."""
    engine = build(config(0, passes=3, exchange_timeout=60))
    stream = torch.utils.data.DataLoader(
        _OfWorkers(300), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    return [refusal(lambda: _trained(engine, stream)), engine.global_steps]


def _made_otherwise_by_a_worker(folder):
    engine = build(config(0, passes=3, exchange_timeout=60))
    stream = torch.utils.data.DataLoader(
        _OfWorkers(9, differ=True), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    return [refusal(lambda: _trained(engine, stream)), engine.global_steps]


def _thrown_away_by_a_load(folder):
    engine, rollouts = _built(2), _rollouts()
    _trained(engine, _own(rollouts[24:]), finish=False)
    engine.save_checkpoint(folder)
    _trained(engine, _own(rollouts[dist.get_rank() :: 2][:3], target=3), finish=False)
    engine.load_checkpoint(folder)
    return [refusal(lambda: _trained(engine, _own(rollouts[:16]))), engine.global_steps]


@on_two_ranks
def plans_between_loops(folder):
    """By what is done: what is raised, and what has become of the run."""
    done = (
        _ended_by_finish,
        _stepped_once_more,
        _left_at_the_second_plan,
        _loaded_where_the_second_plan_begins,
        _made_before_the_engine,
        _through_several_loops,
        _thrown_away_by_a_load,
        _another_epoch,
        _another_plan_in_a_new_engine,
        _replayed_in_a_new_engine,
        _replayed_on_one_rank,
        _replayed_and_other_plans,
        _goes_on_in_a_new_engine,
        _the_same_epochs,
        _goes_on_behind_a_load,
        _goes_on_in_another_engine,
        _looked_at_inside,
        _without_a_window,
    )
    return {one.__name__: from_all(one(folder)) for one in done}


@at_length_on_two_ranks
def plans_of_workers(folder):
    """The same of plans that a data loader's worker makes, a process of its own for each rank."""
    return {one.__name__: from_all(one(folder)) for one in (_made_by_a_worker, _made_otherwise_by_a_worker)}


def test_the_end_of_the_data_settles_no_window_of_different_plans(two_ranks):
    for said, kept in two_ranks.of(plans_between_loops)["_ended_by_finish"]:
        assert said.startswith("RankDesyncError: ranks take their micro-batches from different plans")
        assert kept


def test_a_refused_window_takes_no_second_step(two_ranks):
    for first, second, kept in two_ranks.of(plans_between_loops)["_stepped_once_more"]:
        assert first.startswith("RankDesyncError: ranks take their micro-batches from different plans")
        assert second.startswith(
            "WindowError: window 0 has micro-batches of different plans on its ranks: load a check"
        )
        assert kept


@pytest.mark.parametrize(
    ("done", "steps"),
    [
        ("_left_at_the_second_plan", 2),
        ("_loaded_where_the_second_plan_begins", 1),
        ("_made_before_the_engine", 2),
        ("_through_several_loops", 2),
        ("_thrown_away_by_a_load", 3),
        ("_the_same_epochs", 6),
        ("_goes_on_behind_a_load", 10),
        ("_goes_on_in_another_engine", 6),
        ("_replayed_in_a_new_engine", 2),
        ("_replayed_on_one_rank", 2),
        ("_goes_on_in_a_new_engine", 5),
        ("_looked_at_inside", 2),
    ],
)
def test_ranks_with_the_same_plans_go_on(two_ranks, done, steps):
    assert two_ranks.of(plans_between_loops)[done] == [["nothing was raised", steps]] * 2


@pytest.mark.slow
def test_ranks_whose_workers_make_the_same_plans_go_on(two_ranks_at_length):
    assert two_ranks_at_length.of(plans_of_workers)["_made_by_a_worker"] == [["nothing was raised", 300]] * 2


@pytest.mark.parametrize(
    ("done", "steps"),
    [
        ("_another_epoch", 2),
        ("_another_plan_in_a_new_engine", 0),
        ("_replayed_and_other_plans", 1),
        ("_without_a_window", 2),
    ],
)
def test_what_was_begun_before_hides_no_different_plans(two_ranks, done, steps):
    for said, taken in two_ranks.of(plans_between_loops)[done]:
        assert said.startswith(DIFFERENT)
        assert taken == steps


@pytest.mark.slow
def test_different_plans_of_workers_are_refused(two_ranks_at_length):
    for said, taken in two_ranks_at_length.of(plans_of_workers)["_made_otherwise_by_a_worker"]:
        assert said.startswith(DIFFERENT)
        assert taken == 0
