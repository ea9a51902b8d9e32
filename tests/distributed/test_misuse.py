"""Calls that can't be right are refused with the rule and the way out."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, forward, from_all, one_pass, refusal, run_stream
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


@on_two_ranks
def misuse(folder):
    """What each wrong call is answered with."""
    engine = build(config(1, passes=8))
    results = {
        "negative": refusal(lambda: engine.backward(forward(engine, 0), rollouts=-1)),
        "nan": refusal(lambda: engine.backward(forward(engine, 0), rollouts=float("nan"))),
        "bool": refusal(lambda: engine.backward(forward(engine, 0), rollouts=True)),
        "floats": refusal(lambda: engine.backward(forward(engine, 0), tokens=torch.ones(5).sum())),
        "device": refusal(lambda: engine.backward(forward(engine, 0), tokens=torch.ones(5, device="meta").sum())),
        "scale": refusal(lambda: engine.backward(forward(engine, 0), scale_wrt_gas=False)),
        "step first": refusal(engine.step),
        "boundary": refusal(lambda: engine.set_gradient_accumulation_boundary(True)),
        "batch": refusal(lambda: engine.set_train_batch_size(4)),
        "micro": refusal(lambda: engine.set_train_micro_batch_size(4)),
        "coalesce": refusal(engine.coalesce_grad_reduction),
    }
    one_pass(engine, 1, rollouts=2, tokens=torch.tensor([1, 0, 1]).sum())
    results["tokens"] = f"{engine.window.tokens} tokens"
    results["foretell"] = refusal(engine.is_gradient_accumulation_boundary)
    results["save"] = refusal(lambda: engine.save_checkpoint(folder))
    results["tuple"] = refusal(lambda: engine.backward((forward(engine, 1), 0), rollouts=2, tokens=2))
    engine.backward(forward(engine, 1), rollouts=2, tokens=2)
    results["twice"] = refusal(lambda: engine.backward(forward(engine, 1), rollouts=2, tokens=2))
    results["finish"] = refusal(engine.finish)
    by_token = build(config(1, loss_weight="token"))
    results["no tokens"] = refusal(lambda: by_token.backward(forward(by_token, 0)))
    results["rollouts only"] = refusal(lambda: by_token.backward(forward(by_token, 0), rollouts=1))
    by_prompt = build(config(1, count="prompt"))
    results["no prompts"] = refusal(lambda: by_prompt.backward(forward(by_prompt, 0)))
    results["prompts left out"] = refusal(lambda: by_prompt.backward(forward(by_prompt, 0), rollouts=4))
    exact = build(config(1, passes=3, overshoot="error"))
    results["overshoot"] = refusal(lambda: exact.backward(forward(exact, 0), rollouts=2))
    dry = build(config(1))
    results["stuck"] = refusal(lambda: list(dry.passes([] if dist.get_rank() else [Batch()], lookahead=3)))
    sharded = build(config(3, exchange_timeout=20))
    results["stuck on ZeRO 3"] = refusal(lambda: run_stream(sharded, [] if dist.get_rank() else [Batch()], lookahead=0))
    skipping = build(config(1, passes=20))
    batches = skipping.passes([Batch() for _ in range(3)], finish=False)
    next(batches)
    results["no backward"] = refusal(lambda: next(batches))
    doubled = build(config(1, passes=20))
    unstepped = build(config(1, passes=20))
    for _ in unstepped.passes([Batch() for _ in range(4)], lookahead=4, finish=False):
        unstepped.backward(forward(unstepped, 1))
        results["no step in passes"] = refusal(lambda: unstepped.backward(forward(unstepped, 1)))
        break
    for _ in doubled.passes([Batch()], finish=False):
        one_pass(doubled, 1)
        results["two backwards"] = refusal(lambda: doubled.backward(forward(doubled, 1)))
        results["foretell in passes"] = refusal(doubled.is_gradient_accumulation_boundary)
    ahead = build(config(1, passes=20))
    for _ in ahead.passes([Batch() for _ in range(4)], lookahead=4, finish=False):
        one_pass(ahead, 1)
        results["two backwards ahead"] = refusal(lambda: ahead.backward(forward(ahead, 1)))
        break
    contradicted = build(config(1, passes=4))
    for _ in contradicted.passes([Batch(), Batch()]):
        wrong = refusal(lambda: contradicted.backward(forward(contradicted, 1), rollouts=7))
        results["contradiction"] = wrong
        contradicted.backward(forward(contradicted, 1), rollouts=1)
        contradicted.step()
    results["steps after a contradiction"] = f"{contradicted.last_step.step} step of {contradicted.last_step.rollouts}"
    older = build(config(1, passes=20))
    first, second = (older.passes([Batch() for _ in range(4)], finish=False) for _ in range(2))
    next(first)
    one_pass(older, 1)
    next(second)
    one_pass(older, 1)
    results["older passes"] = refusal(lambda: next(first))
    refused_count = build(config(1, passes=20))
    refusal(lambda: refused_count.backward(forward(refused_count, 0), rollouts=-1))
    results["foretell after a refused count"] = refusal(refused_count.is_gradient_accumulation_boundary)
    synced = build(config(1, passes=2))
    with synced.no_sync():
        results["no_sync"] = refusal(lambda: synced.backward(forward(synced, 0)))
    by_rollout = {k: v for k, v in config(1, lr_progress="rollout").items() if k != "scheduler"}
    results["plateau"] = refusal(lambda: build(by_rollout, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau))
    return results


MISUSE = {
    "negative": "rollouts is -1: a count must be >= 0",
    "nan": "rollouts is nan: a count must be a whole number",
    "bool": "rollouts is True: a count must be a whole number",
    "floats": r"tokens is tensor\(5\.\): a count must be a whole number.*int\(mask.sum\(\)\)",
    "device": "tokens is a tensor on 'meta': reading it would wait.*before the micro-batch is moved",
    "tokens": "4 tokens",
    "scale": "scale_wrt_gas=False.*leave scale_wrt_gas out",
    "step first": "without a backward.*once after every backward",
    "boundary": "ds_parity owns the boundary; remove the call",
    "batch": "set gradient_accumulation_passes in the configuration",
    "micro": "pass rollouts= to backward",
    "coalesce": "ds_parity owns the boundary; remove it",
    "foretell": "before backward.*ask between backward",
    "foretell after a refused count": "before backward.*ask between backward",
    "contradiction": r"backward\(\) got {'rollouts': 7} but passes\(\) has announced Counts\(rollouts=1",
    "steps after a contradiction": "1 step of 4",
    "older passes": "goes on although a newer passes",
    "save": "CheckpointError.*4 rollouts of 1 passes are pending.*finish",
    "twice": "waits for its step",
    "tuple": "got a tuple that is no loss",
    "no step in passes": "waits for its step",
    "no backward": "before the last had its backward.*left out of the stream",
    "two backwards": "had its backward\\(\\) already",
    "two backwards ahead": "had its backward\\(\\) already",
    "foretell in passes": "between two micro-batches of passes",
    "finish": "call step\\(\\) first",
    "no tokens": "without tokens=.*pass tokens=",
    "rollouts only": "rollouts=1.*loss_weight is 'token'",
    "no prompts": "without prompts=.*pass prompts=",
    "prompts left out": "rollouts=4.*without prompts=.*count is 'prompt'.*"
    "0 where their other rollouts are still to come",
    "overshoot": "4 rollouts, 1 more than its target of 3.*choose 'carry' or 'reset'",
    "stuck": "1 of 2 ranks have no micro-batch at all.*idle=micro_batch",
    "stuck on ZeRO 3": "1 of 2 ranks have no micro-batch at all.*idle=micro_batch",
    "no_sync": "inside no_sync.*leave no_sync",
    "plateau": "ReduceLROnPlateau.*choose 'optimizer_step'",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_with_the_rule_and_the_way_out(two_ranks, case):
    assert re.search(MISUSE[case], two_ranks.of(misuse)[case], re.DOTALL)


@on_two_ranks
def late_close(folder):
    """A generator that was left and is closed while a newer one runs."""
    engine = build(config(1, passes=20))
    left = engine.passes([Batch() for _ in range(4)], finish=False)
    next(left)
    one_pass(engine, 1)
    taken = 0
    for _ in engine.passes([Batch() for _ in range(3)], finish=False):
        left.close()
        one_pass(engine, 1)
        taken += 1
    return {"taken": taken, "passes": engine.window.passes}


def test_a_generator_that_is_closed_late_leaves_the_newer_one_alone(two_ranks):
    assert two_ranks.of(late_close) == {"taken": 3, "passes": 4}


WHOLE = {"rollouts": 2, "prompts": 1, "tokens": 6}


@on_two_ranks
def forgotten_counts(folder):
    """A loop that gave a count, and forgets it in a later pass: on all ranks, and on one of them."""
    results = {}
    for name in WHOLE:
        engine = build(config(1, passes=20))
        one_pass(engine, 1, **WHOLE)
        others = {other: count for other, count in WHOLE.items() if other != name}
        said = refusal(lambda: engine.backward(forward(engine, 1), **others))  # noqa: B023  # called here
        held = engine.window
        one_pass(engine, 1, **WHOLE)
        after = engine.window
        results[name] = [said, held.passes, held.rollouts, after.passes, after.rollouts, after.tokens]
    return {**results, "alone": from_all(_forgets_alone()), "allowed": _allowed()}


def _forgets_alone():
    engine = build(config(1, passes=20, exchange_timeout=60))
    one_pass(engine, 1, rollouts=2)
    begun = time.monotonic()
    counts = {} if dist.get_rank() else {"rollouts": 2}
    said = refusal(lambda: one_pass(engine, 1, **counts))
    return [said, engine.window.passes, time.monotonic() - begun]


def _allowed():
    """Idle passes give no counts, and passes() has its own; neither binds the loop."""
    counted, silent = build(config(1, passes=40)), build(config(1, passes=40))
    one_pass(counted, 1, **WHOLE)
    counted.idle(forward(counted, 1))
    counted.step()
    one_pass(counted, 1, rollouts=0)
    for _ in counted.passes([Batch(), Batch()], finish=False):
        one_pass(counted, 1)
    silent.idle(forward(silent, 1))
    silent.step()
    one_pass(silent, 1, rollouts=0, tokens=0)
    one_pass(silent, 1)
    one_pass(silent, 1, rollouts=2)
    return [[counted.window.passes, counted.window.rollouts], [silent.window.passes, silent.window.rollouts]]


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_that_earlier_passes_gave_is_not_left_out_later(two_ranks, name):
    said, *counted = two_ranks.of(forgotten_counts)[name]
    assert re.match(rf"WindowError: backward\(.*\) without {name}=, which earlier passes of this engine gave: .*", said)
    assert f"pass {name}= in every pass" in said
    assert "idle(loss)" in said
    assert counted == [1, 4, 2, 8, 24], "nothing was counted of it, and the loop goes on"


def test_the_other_ranks_hear_at_once_of_a_count_that_one_of_them_forgot(two_ranks):
    (told, theirs, waited), (said, own, _) = two_ranks.of(forgotten_counts)["alone"]
    assert said.startswith("WindowError: backward(loss) without rollouts=")
    assert told.startswith("RankDesyncError: this rank stops because another did: ")
    assert "rank 1 has raised WindowError: backward(loss) without rollouts=" in told
    assert (theirs, own) == (1, 1)
    assert waited < 20


def test_idle_passes_and_passes_of_a_stream_need_no_counts(two_ranks):
    assert two_ranks.of(forgotten_counts)["allowed"] == [[5, 8], [4, 6]]


@on_two_ranks
def reduced_again(folder):
    """What a second reduction of a window's gradients is answered with, and how far the step is off behind it."""
    results = {}
    for boundary in ("rollouts", "caller"):
        section = {"boundary": "caller"} if boundary == "caller" else {"passes": 4}
        engines = [build(config(1, **section)) for _ in range(2)]
        for engine in engines:
            one_pass(engine, 1, rollouts=1) if boundary == "rollouts" else engine.backward(
                forward(engine, 1), rollouts=1
            )
            if boundary == "caller":
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(forward(engine, 2), rollouts=1)
            if engine is engines[0]:
                results[boundary] = from_all(refusal(engine.allreduce_gradients))
            engine.step()
        weights = [torch.cat([p.detach().flatten() for p in engine.module.parameters()]) for engine in engines]
        results[f"{boundary} apart"] = float((weights[0] - weights[1]).abs().max())
    return results


@pytest.mark.parametrize("boundary", ["rollouts", "caller"])
def test_a_second_reduction_is_refused_and_the_window_goes_on(two_ranks, boundary):
    results = two_ranks.of(reduced_again)
    for said in results[boundary]:
        assert said.startswith("WindowError: engine.allreduce_gradients() behind the last backward() of a window")
    assert results[f"{boundary} apart"] == 0.0
