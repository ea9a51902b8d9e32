"""A trace has the steps of one engine: another engine of the process may have its file when the first has ended."""

import gc
from contextlib import chdir
from pathlib import Path

import deepspeed
import pytest
import torch.distributed as dist

import ds_parity
from ds_parity.trace import read_trace
from tests.distributed.cells import config
from tests.distributed.engines import build, forward, from_all, listen, one_pass, perceptron, refusal
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks


def traced(path, stage=2):
    return build(config(stage, passes=4, trace=str(path)))


def windows(engine, count):
    """Windows of two passes of one rollout on each rank."""
    for index in range(2 * count):
        one_pass(engine, index, rollouts=1)


def steps(path):
    dist.barrier()  # the first rank writes
    read = [step.step for step in read_trace(path).steps]
    dist.barrier()
    return read


def made(folder):
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return Path(folder)


@on_two_ranks
def shared(folder):
    """An actor, and a critic that is given its file by one name or another, before and between its steps."""
    folder, results = made(folder), {}
    path = folder / "trace.jsonl"
    if dist.get_rank() == 0:
        (folder / "link.jsonl").symlink_to(path)
    dist.barrier()
    actor = traced(path)
    results["the same"] = from_all(refusal(lambda: traced(path)))
    windows(actor, 1)
    results["in mid-run"] = from_all(refusal(lambda: traced(path)))
    results["link"] = from_all(refusal(lambda: traced(folder / "link.jsonl")))
    with chdir(folder):
        results["relative"] = from_all(refusal(lambda: traced("./trace.jsonl")))
    # ZeRO 3 engines of DeepSpeed stay in memory; what counts is whether somebody can still drive it.
    results["stage 3"] = from_all(refusal(lambda: traced(path, stage=3)))
    actor.finish()
    windows(actor, 1)
    results["finished, and going on"] = from_all(refusal(lambda: traced(path)))
    critic = traced(folder / "critic.jsonl")
    windows(critic, 1)
    windows(actor, 1)
    return {**results, "actor": steps(path), "critic": steps(folder / "critic.jsonl")}


NAMES = ("the same", "in mid-run", "link", "relative", "stage 3", "finished, and going on")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_an_engine_writes_is_refused_to_another_on_every_rank(two_ranks, name):
    for told in two_ranks.of(shared)[name]:
        assert told.startswith("TraceError: ds_parity.trace = '")
        assert "of the engine over a Sequential is the file that another engine of this process writes" in told
        assert "Give each engine a path of its own" in told


def test_no_line_of_either_is_lost(two_ranks):
    result = two_ranks.of(shared)
    assert result["actor"] == [1, 2, 3]
    assert result["critic"] == [1]


@on_two_ranks
def taken_over(folder):
    """Runs one after the other in one process, each ended in another way."""
    path, results = made(folder) / "trace.jsonl", {}
    finished = traced(path)
    windows(finished, 3)
    finished.finish()
    second = traced(path)
    windows(second, 2)
    results["after one that has finished"] = steps(path)
    text, stop_listening = listen()
    windows(finished, 2)
    finished.save_checkpoint(folder)
    finished.load_checkpoint(folder)
    stop_listening()
    results["said"] = text.getvalue()
    windows(second, 1)
    results["beside one that goes on"] = steps(path)
    second.stop()
    windows(second, 1)
    third = traced(path)
    windows(third, 1)
    results["after one that was stopped"] = steps(path)
    del third
    fourth = traced(path)
    windows(fourth, 2)
    results["after one that is gone"] = steps(path)
    cycle = [fourth]
    cycle.append(cycle)
    gc.disable()
    del fourth, cycle
    windows(traced(path), 1)
    gc.enable()
    results["after one that a cycle holds"] = steps(path)
    return results


def test_an_engine_that_has_ended_in_any_way_blocks_nothing(two_ranks):
    result = two_ranks.of(taken_over)
    assert result["after one that has finished"] == [1, 2]
    assert result["after one that was stopped"] == [1]
    assert result["after one that is gone"] == [1, 2]
    assert result["after one that a cycle holds"] == [1]


def test_one_that_goes_on_after_its_file_was_taken_writes_nothing_and_says_so_once(two_ranks):
    result = two_ranks.of(taken_over)
    assert result["beside one that goes on"] == [1, 2, 3]
    assert result["said"].count("belongs to an engine that was made after this one") == 1


def opened(extended):
    model = perceptron()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=extended)[0]


def drive(engine, flags):
    """Passes of one rollout on each rank, as accelerate runs them."""
    for flag in flags:
        engine.set_gradient_accumulation_boundary(flag)
        engine.backward(forward(engine, 0))
        if flag:
            engine.step()


@on_two_ranks
def by_frameworks(folder):
    """A framework that trains twice, as a Trainer does: it holds its first engine while it makes the second."""
    path = made(folder) / "trace.jsonl"
    extended = config(2, passes=4, trace=str(path))
    with ds_parity.install():
        first = opened(extended)
        beside = from_all(refusal(lambda: opened(extended)))
        drive(first, [False])
        inside = from_all(refusal(lambda: opened(extended)))
        drive(first, [True])
        second = opened(extended)
        drive(second, [False, True] * 2)
    return {"beside": beside, "inside a window": inside, "steps": steps(path)}


@pytest.mark.parametrize("when", ["beside", "inside a window"])
def test_a_framework_is_refused_a_second_engine_that_would_mix_its_lines(two_ranks, when):
    for told in two_ranks.of(by_frameworks)[when]:
        assert told.startswith("TraceError: ds_parity.trace = ")


def test_a_framework_that_never_says_finish_may_train_again(two_ranks):
    assert two_ranks.of(by_frameworks)["steps"] == [1, 2]


@on_two_ranks
def elsewhere(folder):
    """The second rank's paths are its own affair; and the folder changes before the first step."""
    folder, results = made(folder), {}
    second = dist.get_rank() == 1
    _kept = traced(folder / ("b" if second else "a"))
    results["of another rank"] = from_all(refusal(lambda: traced(folder / ("b" if second else "c"))))
    (folder / "there").mkdir(exist_ok=True)
    relative = f"late{dist.get_rank()}.jsonl"
    with chdir(folder):
        done = traced(relative)
        windows(done, 1)
        done.finish()
        late = traced(relative)
    with chdir(folder / "there"):
        windows(late, 2)
    results["late"] = steps(folder / "late0.jsonl")
    return {**results, "left": [path.name for path in (folder / "there").iterdir()]}


def test_only_what_the_first_rank_writes_is_compared(two_ranks):
    assert two_ranks.of(elsewhere)["of another rank"] == ["nothing was raised"] * 2


def test_a_relative_path_is_that_of_the_folder_in_which_the_engine_was_made(two_ranks):
    result = two_ranks.of(elsewhere)
    assert result["late"] == [1, 2]
    assert result["left"] == []
