"""Calls in odd places, that would be counted wrongly, wait for half an hour or train nothing: all ranks refuse them."""

import copy
import functools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import Batch, build, forward, from_all, one_pass, perceptron, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
STAGES = [0, 1, 2, 3]


def _dropped(engine):
    """A generator that nobody holds takes the counts along."""
    next(engine.passes([Batch(rollouts=2)], finish=False))


def _left(engine):
    for _ in engine.passes([Batch(rollouts=2)], lookahead=2, finish=False):
        break


def _nested(engine):
    """The outer one waits for its backward, while the inner one runs whole and ends the data."""
    outer = engine.passes([Batch(rollouts=2)])
    next(outer)
    for _ in engine.passes([Batch(), Batch()]):
        one_pass(engine, 1)
    return outer


LEFT = {"dropped": _dropped, "left": _left, "nested": _nested}


@on_two_ranks
def counts_that_are_gone(folder):
    """By how passes() was left: what a backward without counts is answered with, and what is counted of one with."""
    results = {}
    for name, leave in LEFT.items():
        engine = build(config(1, passes=20))
        held = leave(engine)
        said = refusal(lambda: engine.backward(forward(engine, 1)))  # noqa: B023  # called here
        before = engine.window.rollouts
        one_pass(engine, 1, rollouts=2)
        results[name] = [said, engine.window.rollouts - before]
        del held
    ended = build(config(1, passes=20))
    _left(ended)
    ended.finish()
    one_pass(ended, 1)
    again = build(config(1, passes=20))
    _left(again)
    for _ in again.passes([Batch()], finish=False):
        one_pass(again, 1)
    one_pass(again, 1)
    return {**results, "finished": ended.window.rollouts, "another": again.window.rollouts}


@pytest.mark.parametrize("how", LEFT)
def test_a_pass_behind_its_generator_is_not_counted_as_a_usual_one(two_ranks, how):
    said, counted = two_ranks.of(counts_that_are_gone)[how]
    assert said.startswith("WindowError: backward(loss) behind a passes() that was left")
    assert "pass rollouts= here" in said
    assert counted == 4, "with its counts it runs"


def test_behind_finish_or_another_passes_a_loop_needs_no_counts(two_ranks):
    results = two_ranks.of(counts_that_are_gone)
    assert results["finished"] == 2
    assert results["another"] == 4


@on_two_ranks
def checkpoints_of_one_rank(folder):
    """By stage and call: what the rank that saves or loads alone is told, what the other one, and after how long.

    On ZeRO 3 the other one waits in its forward, inside DeepSpeed, and closes connections when its time is up.
    """
    results = {}
    for stage in STAGES[:3]:
        for name in ("save_checkpoint", "load_checkpoint"):
            engine = build(config(stage, passes=4, exchange_timeout=60))
            engine.save_checkpoint(f"{folder}/{stage}")
            begun = time.monotonic()
            call = functools.partial(one_pass, engine, 1)
            if dist.get_rank() == 0:
                call = functools.partial(getattr(engine, name), f"{folder}/{stage}")
            said = refusal(call)
            results[f"{name}-{stage}"] = from_all([said, time.monotonic() - begun])
    return results


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize(("name", "does"), [("save_checkpoint", "saves"), ("load_checkpoint", "loads")])
def test_a_rank_that_saves_or_loads_alone_and_the_others_are_told_at_once(two_ranks, stage, name, does):
    for said, seconds in two_ranks.of(checkpoints_of_one_rank)[f"{name}-{stage}"]:
        assert said.startswith("RankDesyncError: ranks are not in the same place: rank 0 " + does + " a checkpoint in ")
        assert "rank 1 runs a pass in window 0" in said
        assert "Every rank must call save_checkpoint() and load_checkpoint()" in said
        assert seconds < 20


def _break(file, how):
    there = file.read_bytes()
    if how == "lost":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(there[:100])
    else:
        at = there.find(b"optimizer_state_dict")
        file.write_bytes(there[: at - 8] + b"\xff" * 16 + there[at + 8 :])


@on_two_ranks
def checkpoints_with_a_broken_file(folder):
    """By stage and what is wrong with rank 1's states: what ranks are told; and behind it, of a whole checkpoint."""
    results = {}
    for stage in (1, 2, 3):
        for how in ("cut short", "lost", "damaged")[: 1 if stage == 3 else 3]:  # there a rank waits in the load
            engine = build(config(stage, passes=4, exchange_timeout=60))
            for tag in ("whole", "broken"):
                engine.save_checkpoint(f"{folder}/{stage}", tag=tag)
            if dist.get_rank() == 1:
                for file in Path(folder, str(stage), "broken").glob("*zero_pp_rank_1_*_optim_states.pt"):
                    _break(file, how)
            dist.barrier()
            begun = time.monotonic()
            said = refusal(lambda e=engine, f=f"{folder}/{stage}": e.load_checkpoint(f, tag="broken"))
            results[f"{stage} {how}"] = from_all([said, time.monotonic() - begun])
            other = build(config(stage, passes=4))
            other.load_checkpoint(f"{folder}/{stage}", tag="whole")
            one_pass(other, 1)
            results[f"{stage} {how}, then"] = other.window.rollouts
            for one in (engine, other):
                one.destroy()
    return results


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("how", "why"), [("damaged", "can't be read"), ("lost", "is not there")])
def test_a_file_that_one_rank_cannot_load_is_an_error_on_every_rank(two_ranks, stage, how, why):
    results = two_ranks.of(checkpoints_with_a_broken_file)
    (other, _), (own, seconds) = results[f"{stage} {how}"]
    assert other.startswith("RankDesyncError: this rank stops because another did: rank 0 has loaded a checkpoint")
    assert why in own
    assert own.startswith("CheckpointError: load_checkpoint(")
    assert "rank 1 has raised CheckpointError" in other
    assert seconds < 20
    assert results[f"{stage} {how}, then"] == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_file_of_one_rank_without_an_end_is_told_on_all_before_anything_is_loaded(two_ranks, stage):
    results = two_ranks.of(checkpoints_with_a_broken_file)
    for said, seconds in results[f"{stage} cut short"]:
        assert said.startswith("CheckpointError: load_checkpoint(")
        assert "_optim_states.pt has no end, as a file that was cut short" in said
        assert "Nothing was loaded" in said
        assert seconds < 20
    assert results[f"{stage} cut short, then"] == 2


@on_two_ranks
def parameters_of_another_model(folder):
    """By stage: what an optimizer of another copy is answered with, `model_parameters` of one, and a late group."""
    results = {}
    for stage in STAGES:
        model, extended = perceptron(), {k: v for k, v in config(stage).items() if k != "optimizer"}
        other = copy.deepcopy(model)
        client = torch.optim.SGD(model.parameters(), lr=0.1)
        extended["zero_allow_untested_optimizer"] = True
        make = functools.partial(ds_parity.initialize, model=other)
        optimizer = refusal(functools.partial(make, optimizer=client, config=extended))
        parameters = refusal(functools.partial(make, model_parameters=model.parameters(), config=config(stage)))
        late, groups = {"params": [torch.nn.Parameter(torch.ones(2))]}, []
        if stage:
            engine = build(config(stage))
            for one in (engine.optimizer, engine.basic_optimizer):
                groups.append(refusal(functools.partial(one.add_param_group, late)))
        results[str(stage)] = [optimizer, parameters, *groups]
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_what_would_never_be_trained_is_refused(two_ranks, stage):
    optimizer, parameters, *groups = two_ranks.of(parameters_of_another_model)[str(stage)]
    assert optimizer.startswith("ConfigError: optimizer= contains 4 parameters, of which 4 (the first of shape (8, 4))")
    assert parameters.startswith("ConfigError: model_parameters= contains 4 parameters, of which 4 ")
    assert len(groups) == 2 * bool(stage)
    for said in groups:
        assert said.startswith(f"WindowError: add_param_group() on ZeRO stage {stage} (")


@on_two_ranks
def steps_in_inference_mode(folder):
    """By stage: what step() is answered with, and whether training goes on behind it."""
    results = {}
    for stage in STAGES:
        engine = build(config(stage, passes=2))
        said = []
        for number in range(4):
            engine.backward(forward(engine, number), rollouts=1, tokens=3)
            with torch.inference_mode():
                said.append(refusal(engine.step))
            if said[-1] != "nothing was raised":
                engine.step()
        results[str(stage)] = [said, engine.global_steps]
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_in_inference_mode_is_taken_or_refused_before_it_breaks_the_next_pass(two_ranks, stage):
    said, steps = two_ranks.of(steps_in_inference_mode)[str(stage)]
    assert steps == 4
    for one in said:
        if stage == 3:
            assert one.startswith("WindowError: step() or finish() under torch.inference_mode()")
        else:
            assert one == "nothing was raised"


class _Adapted(torch.nn.Module):
    """A frozen layer in bf16, and a trained one in fp32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(4, 4).bfloat16().requires_grad_(False)
        self.adapter = torch.nn.Linear(4, 2)


def _adapted(stage, how):
    """What an engine is built with: all parameters or the trained ones, by an optimizer, a function or a list."""
    model, extended = _Adapted(), {k: v for k, v in config(stage).items() if k not in ("optimizer", "scheduler")}
    kind, whose = how.split(" of ")
    trained = [one for one in model.parameters() if one.requires_grad]
    chosen = trained if whose == "trained" else list(model.parameters())
    given = {
        "optimizer": lambda: {"optimizer": torch.optim.SGD(chosen, lr=0.1)},
        "function": lambda: {"optimizer": lambda _: torch.optim.SGD(chosen, lr=0.1)},
        "generator": lambda: {"model_parameters": [{"params": (one for one in chosen)}]},
    }[kind]()
    if kind == "generator":
        extended["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    return refusal(lambda: ds_parity.initialize(model=model, config=extended, **given))


HANDED_OVER = [f"{kind} of {whose}" for kind in ("optimizer", "function", "generator") for whose in ("all", "trained")]


@on_two_ranks
def narrow_first_parameters(folder):
    return {f"{stage} {how}": from_all(_adapted(stage, how)) for stage in STAGES for how in HANDED_OVER}


@pytest.mark.parametrize("how", HANDED_OVER)
@pytest.mark.parametrize("stage", STAGES)
def test_a_narrow_first_parameter_is_refused_however_it_was_handed_over(two_ranks, stage, how):
    for said in two_ranks.of(narrow_first_parameters)[f"{stage} {how}"]:
        if stage in (1, 2) and how.endswith("all"):
            assert "is bfloat16, while trained ones are float32" in said
        else:
            assert said == "nothing was raised"
