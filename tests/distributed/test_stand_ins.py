"""What `passes()` hands out in idle passes counts nothing, and nothing that was run is kept but the smallest."""

import weakref

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import Batch, build, forward, from_all, one_pass
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Rollouts of the micro-batches: nine, in windows that close at four; rank 1 runs out of data long before rank 0.
ROLLOUTS = ([1, 2, 1, 1, 2], [1, 1])
NAMED = ("micro-batch", "dataclass")


def _batch(kind, number, rollouts):
    tokens = 3 * rollouts + number % 3
    if kind == "dataclass":
        return Batch(number, rollouts, 0, tokens)
    return ds_parity.MicroBatch({"seed": number}, rollouts, 0, tokens)


def _seed(batch):
    return batch.seed if isinstance(batch, Batch) else batch.inputs["seed"]


@at_length_on_two_ranks
def actor_and_critic(folder):
    """A critic that is trained in the actor's loop, beside one that is driven by itself over the same passes."""
    results = {}
    for stage in STAGES:
        for kind in NAMED:
            for ahead in (0, 3):
                results[f"{stage} {kind} {ahead}"] = _trained(stage, kind, ahead)
    return results


def _trained(stage, kind, ahead):
    rank = dist.get_rank()
    extended = config(stage, passes=4, loss_weight="token", lookahead=ahead)
    actor, critic, alone = build(extended), build(config(stage, passes=4, loss_weight="token")), build(extended)
    own = [_batch(kind, 10 * rank + n, rollouts) for n, rollouts in enumerate(ROLLOUTS[rank])]
    said, passed, steps = [], 0, [[], []]
    for batch in actor.passes(own, skip_idle=False):
        passed += 1
        actor.backward(forward(actor, _seed(batch)))
        critic.backward(forward(critic, 100 + _seed(batch)), rollouts=batch.rollouts, tokens=batch.tokens)
        said.append((getattr(batch, "idle", False), batch.rollouts, batch.tokens))
        for engine, closed in zip((actor, critic), steps, strict=True):
            engine.step()
            if engine.window.passes == 0:
                closed.append(engine.last_step.rollouts)
    critic.finish()
    reached = [critic.global_samples, critic.last_step.total, weights.vector(critic.module)]
    for batch in own:
        one_pass(alone, 100 + _seed(batch), rollouts=batch.rollouts, tokens=batch.tokens)
    for _ in range(passed - len(own)):
        alone.idle(forward(alone, 100))
        alone.step()
    alone.finish()
    return {
        "said": from_all(said),
        "steps": steps,
        "rollouts": [actor.global_samples, critic.global_samples],
        "equal": torch.equal(reached[2], weights.vector(alone.module)),
        "total": [reached[1], alone.last_step.total],
        "actor": _actor_alone(stage, own, ahead, actor),
    }


def _actor_alone(stage, own, ahead, actor):
    """Whether the actor's weights are those of one that shares its loop with nobody."""
    engine = build(config(stage, passes=4, loss_weight="token", lookahead=ahead))
    for batch in engine.passes(own, skip_idle=False):
        engine.backward(forward(engine, _seed(batch)))
        engine.step()
    return torch.equal(weights.vector(actor.module), weights.vector(engine.module))


@pytest.mark.parametrize("ahead", ["0", "3"])
@pytest.mark.parametrize("kind", NAMED)
class TestACriticInTheActorsLoop:
    def test_counts_the_rollouts_that_there_are(self, two_ranks_at_length, stage, kind, ahead):
        """Seven are the actor's of rank 0, two of rank 1; what rank 1 runs again counts nothing."""
        result = two_ranks_at_length.of(actor_and_critic)[f"{stage} {kind} {ahead}"]
        assert result["rollouts"] == [9, 9]
        assert result["steps"][0] == result["steps"][1]

    def test_steps_as_one_that_is_driven_by_itself(self, two_ranks_at_length, stage, kind, ahead):
        result = two_ranks_at_length.of(actor_and_critic)[f"{stage} {kind} {ahead}"]
        assert result["equal"]
        assert result["actor"]
        assert result["total"][0] == result["total"][1]

    def test_is_told_which_micro_batches_are_stand_ins(self, two_ranks_at_length, stage, kind, ahead):
        said = two_ranks_at_length.of(actor_and_critic)[f"{stage} {kind} {ahead}"]["said"]
        assert [one[0] for one in said[0]] == [False] * 5
        assert said[1][2:] == [[True, 0, 0]] * 3
        assert [one[0] for one in said[1][:2]] == [False, False]


@at_length_on_two_ranks
def marked(folder):
    """What says by itself that it holds nothing, and what is given to stand in."""
    engine = build(config(2, passes=12))
    nothing = Batch(9, 0, 0, 0)
    given = [nothing, Batch(1)] if dist.get_rank() else [Batch(1), Batch(2), Batch(3)]
    handed = []
    for batch in engine.passes(given, idle=Batch(7, 1, 1, 4)):
        handed.append((batch.seed, batch.rollouts, batch.prompts, batch.tokens, getattr(batch, "idle", None)))
        one_pass(engine, batch.seed)
    late = build(config(2, passes=12))
    stands = []
    for batch in late.passes([] if dist.get_rank() else [Batch(1)], idle=Batch(7, 1, 1, 4)):
        stands.append((batch.seed, batch.rollouts, batch.prompts, batch.tokens, getattr(batch, "idle", None)))
        one_pass(late, batch.seed)
    return {
        "handed": from_all(handed),
        "stands": from_all(stands),
        "left": (nothing.rollouts, hasattr(nothing, "idle")),
    }


def test_a_micro_batch_that_holds_nothing_and_one_that_is_given_say_so_too(two_ranks_at_length):
    result = two_ranks_at_length.of(marked)
    assert result["handed"][1] == [[9, 0, 0, 0, True], [1, 1, 0, 3, None], [9, 0, 0, 0, True]]
    assert [one[4] for one in result["handed"][0]] == [None] * 3
    assert result["stands"] == [[[1, 1, 0, 3, None]], [[7, 0, 0, 0, True]]]
    assert result["left"] == [0, False]


@at_length_on_two_ranks
def taken_apart(folder):
    """A loop that takes the inputs of its micro-batches apart, the first time too."""
    engine = build(config(2, passes=12))
    stream = [ds_parity.MicroBatch({"seed": n}, 1, 0, 3) for n in range(1 if dist.get_rank() else 3)]
    seeds = []
    for batch in engine.passes(stream):
        seeds.append(batch.inputs.pop("seed"))
        one_pass(engine, seeds[-1])
    return from_all(seeds)


def test_an_idle_pass_finds_inputs_whole_that_a_loop_has_taken_apart(two_ranks_at_length):
    assert two_ranks_at_length.of(taken_apart) == [[0, 1, 2], [0, 0, 0]]


@at_length_on_two_ranks
def alive(folder):
    """How many micro-batches live: those that were run, after each step; and all, when one is read."""
    results = {}
    for stage in (0, 3):
        for ahead in (0, 1, 8):
            engine = build(config(stage, passes=7))
            results[f"{stage} {ahead}"] = from_all(_counted(engine, ahead, 30 - 11 * dist.get_rank()))
    return results


def _counted(engine, ahead, count):
    batches, tensors, read, run, kept = [], [], [], [], []

    def made(number):
        batch = Batch(number, tokens=20 - number % 9)  # smaller ones come all the time
        batch.inputs = {"x": torch.ones(3)}
        batches.append(weakref.ref(batch))
        tensors.append(weakref.ref(batch.inputs["x"]))
        return batch

    def stream():
        for number in range(count):
            yield made(number)
            read.append(_living(batches))

    for batch in engine.passes(stream(), lookahead=ahead):
        one_pass(engine, batch.seed)
        passed = min(len(run) + 1, count)
        run.append(_living(batches[:passed]))
        kept.append(_living(tensors[:passed]))
    del batch
    return {"read": max(read), "run": max(run), "kept": max(kept), "end": _living(batches) + _living(tensors)}


def _living(references):
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("ahead", [0, 1, 8])
@pytest.mark.parametrize("stage", [0, 3])
def test_of_what_was_run_the_inputs_of_the_smallest_alone_are_kept(two_ranks_at_length, stage, ahead):
    """The loop itself holds the micro-batch that it runs, and has it still while the next ones are read."""
    for rank in two_ranks_at_length.of(alive)[f"{stage} {ahead}"]:
        assert rank["run"] == 1
        assert rank["kept"] == 2
        assert rank["read"] <= 2 * max(1, ahead)
        assert rank["end"] == 0
