"""What a loop does to its process beside training: forks, variables, threads, signals, workers that load data."""

import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ds_parity
from tests.hard.unforeseen.cells import STAGES, Cell, Found
from tests.hard.unforeseen.scenarios import Scenarios
from tests.hard.unforeseen.whole_windows import Beside

play = Scenarios()


def batches(indices, rollouts=2):
    return [ds_parity.MicroBatch({"index": index}, rollouts=rollouts) for index in indices]


def _exits():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _frees():
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)


def _uses(engine):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            engine.module(torch.ones(2, 6), torch.ones(2))
            str(engine.window), engine.last_step
        os._exit(0)
    os.waitpid(child, 0)


def _process():
    process = multiprocessing.get_context("fork").Process(target=sum, args=([1, 2],))
    process.start()
    process.join()
    assert process.exitcode == 0


FORKS = {
    "exits": lambda engine: _exits(),
    "frees": lambda engine: _frees(),
    "uses": _uses,
    "process": lambda engine: _process(),
    "command": lambda engine: subprocess.run([sys.executable, "-c", ""], check=True),
}


@play.right([Cell(0), Cell(1), Cell(2)], FORKS)
def the_process_forks(case):
    """Between windows and inside them, with a trace open."""
    watched = Beside(case.cell, section={"trace": f"{case.folder}-trace.jsonl"})
    for index in range(5):
        FORKS[case.variant](watched.engine)
        watched.passes([index])
    return watched.found()


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ds_parity.MicroBatch({"index": index}, rollouts=2)


def first(items):
    return items[0]


@play.right(STAGES[:3], ["0", "2-persistent", "2", "spawned"])
def workers_load_the_stream(case):
    how = {
        "0": {},
        "2": {"num_workers": 2},
        "2-persistent": {"num_workers": 2, "persistent_workers": True},
        "spawned": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    }[case.variant]
    watched = Beside(case.cell)
    loader = DataLoader(Numbers(), batch_size=1, collate_fn=first, **how)
    for _ in range(1 if case.variant == "spawned" else 2):
        for batch in watched.engine.passes(loader, lookahead=2, prefetch=2):
            watched.engine.backward(watched.loss(batch.inputs["index"]))
            watched.engine.step()
            watched.has(batch.inputs["index"])
            if len(watched.window) == 4:
                watched.steps()
    return watched.found()


@contextlib.contextmanager
def _environment(**values):
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if value is not None})
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


VARIABLES = {
    "gone": dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),  # DeepSpeed needs LOCAL_RANK
    "wrong": {"RANK": "0", "LOCAL_RANK": "7", "WORLD_SIZE": "64", "MASTER_PORT": "1"},
    "text": {"RANK": "x", "LOCAL_RANK": "", "WORLD_SIZE": "many"},
}


@play.right([Cell(0), Cell(2), Cell(3)], VARIABLES)
def the_environment_changes(case):
    """Behind the first window; a checkpoint and a second engine come there."""
    watched = Beside(case.cell)
    watched.passes(range(2))
    with _environment(**VARIABLES[case.variant]):
        watched.engine.record("a", 1.0)
        watched.passes(range(2, 4))
        watched.engine.save_checkpoint(case.folder, "a")
        watched.engine.load_checkpoint(case.folder, "a")
        if case.variant != "text":  # DeepSpeed reads LOCAL_RANK itself
            other = Beside(case.cell)
            other.passes(range(2))
        watched.passes(range(4, 6))
    return watched.found()


@play.right([Cell(0), Cell(2), Cell(3)], ["thread-each", "built-elsewhere", "daemon"])
def threads_take_turns(case):
    """Each pass runs in a thread of its own, or all do in one in which the engine was not built."""
    box = {}

    def build():
        box["watched"] = Beside(case.cell)

    if case.variant == "built-elsewhere":
        _in_thread(build)
    else:
        build()
    watched = box["watched"]
    for index in range(6):
        if case.variant == "built-elsewhere":
            watched.passes([index])
        else:
            _in_thread(lambda index=index: watched.passes([index]), daemon=case.variant == "daemon")
    return watched.found()


def _in_thread(call, *, daemon=False):
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


HANDLED = {
    "stop": lambda watched, folder: watched.engine.stop(),
    "record": lambda watched, folder: watched.engine.record("signals", 1.0),
    "window": lambda watched, folder: str(watched.engine.window),
    "last-step": lambda watched, folder: watched.engine.last_step,
    "evaluate": lambda watched, folder: _quiet(watched),
}


def _quiet(watched):
    with torch.no_grad():
        watched.engine.module(*watched.inputs(70))


@play.right([Cell(0), Cell(1), Cell(2)], HANDLED)
def a_signal_comes_at_any_moment(case):
    """To each rank by its own clock, many times a second."""
    watched, seen = Beside(case.cell), []

    def handler(*_):
        seen.append(1)
        HANDLED[case.variant](watched, case.folder)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.001 * watched.rank, 0.0031 + 0.0007 * watched.rank)
    try:
        for index in range(40):
            if index % 10 == 0:
                time.sleep(0.004 * watched.rank)
            watched.passes([index])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return watched.found([len(seen) > 3], [True])


@play.right([Cell(0), Cell(2)], ["advantages", "save", "expect"])
def a_signal_handler_talks_to_other_ranks(case):
    """Rank 1 is late, and rank 0 waits for its counts; the handler there must not wait for ever."""
    watched, said = Beside(case.cell), []
    calls = {
        "advantages": lambda: watched.engine.group_advantages([1], [1.0]),
        "save": lambda: watched.engine.save_checkpoint(case.folder, "a"),
        "expect": lambda: watched.engine.expect(rollouts=2),
    }

    def handler(*_):
        try:
            calls[case.variant]()
        except ds_parity.WindowError as error:
            said.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        watched.passes(range(2))
        if watched.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        else:
            time.sleep(1.0)
        watched.passes(range(2, 4))
    finally:
        signal.signal(signal.SIGALRM, before)
    told = [one.startswith("a call that talks to other ranks was made in a signal handler") for one in said]
    return watched.found([told], [[True] * (1 - watched.rank)])


@contextlib.contextmanager
def interrupted_at(number):
    """Raise KeyboardInterrupt at the given line of ds_parity that runs inside; yields whether it has come to it.

    Not where ranks talk: an exchange that is interrupted can't go on, which is another test.
    """
    left, met = [number], []

    def watch(frame, event, _):
        if "/ds_parity/" not in frame.f_code.co_filename or "/ranks/" in frame.f_code.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                met.append(frame.f_code.co_name)
                raise KeyboardInterrupt
        return watch

    sys.settrace(watch)
    try:
        yield met
    finally:
        sys.settrace(None)


class Interrupted:
    """An engine whose first pass is interrupted at one line after the other, and the oracle of what it does then."""

    def __init__(self, case):
        self.case, self.caller = case, case.variant == "caller"
        self.section = {"boundary": "caller"} if self.caller else {}
        self.build()
        self.start = copy.deepcopy(self.watched.model.state_dict())

    def build(self):
        """Begin with a new engine."""
        self.watched = Beside(self.case.cell, 4 * dist.get_world_size(), section=self.section)
        self.watched.engine.save_checkpoint(self.case.folder, "start")

    def back(self):
        """Go back to the start, by a checkpoint."""
        self.watched.engine.load_checkpoint(self.case.folder, "start")
        self.watched.model.load_state_dict(self.start)
        self.watched.window = []

    def run(self, index):
        """Run a pass."""
        self.watched.engine.backward(self.watched.loss(index), rollouts=2)
        if not self.caller:
            self.watched.engine.step()

    def ends(self, counted):
        """Run what is left of a window of two passes; whether it is the oracle's, None where it was refused."""
        try:
            if counted:
                self.watched.has(0)
            for index in (1, 2)[: 2 - counted]:
                self.run(index)
                self.watched.has(index)
            if self.caller:
                self.watched.engine.step()
        except ds_parity.DsParityError:
            return None
        self.watched.steps()
        return self.watched.apart() < 1e-6


@play.right([Cell(0)], ["rollouts-1", "caller-1"])
@play.right(STAGES[1:3], ["rollouts-9", "caller-9"])
def an_interrupt_comes_at_every_line(case):
    """Of a pass, or at every ninth; the loop catches it and goes on. What was counted is in the step, or is refused.

    On ZeRO 3 DeepSpeed's own backward can't be interrupted: it leaves parameters gathered, and the next forward raises.
    """
    mode, every = case.variant.split("-")
    played, wrong, number, right = Interrupted(replace(case, variant=mode)), [], 1, 0
    while True:
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as met:
            played.run(0)
        if not met:
            break
        ended = played.ends(played.watched.engine.window.passes)
        right += bool(ended)
        if ended is False:
            wrong.append([number, met])
        if ended is None and case.cell.stage:
            played.build()
        else:
            played.back()
        number += int(every)
    return Found(got=[wrong, right > 3, number > 50], right=[[], True, True])


@play.right([Cell(0)], ["rollouts-1", "caller-1"])
@play.right(STAGES[1:3], ["rollouts-13", "caller-13"])
def an_interrupt_comes_at_every_line_of_a_step(case):
    """Of the pass that closes a window, or of the caller's step(); the loop catches it, and ends the window again."""
    mode, every = case.variant.split("-")
    played, wrong, number, taken = Interrupted(replace(case, variant=mode)), [], 1, 0
    while True:
        engine, before = played.watched.engine, played.watched.engine.global_steps
        for index in range(1 + played.caller):
            played.run(index)
        with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as met:
            engine.step() if played.caller else played.run(1)
        if not met:
            break
        second, refused = 1, False
        if engine.window.index == 0:
            try:
                if played.caller:
                    engine.step()
                else:
                    second = 2
                    played.run(2)
            except ds_parity.DsParityError:
                refused = True
        if not refused:
            played.watched.has(0)
            played.watched.has(second)
            played.watched.steps()
            taken += 1
            if played.watched.apart() > 1e-6 or engine.global_steps != before + 1:
                wrong.append([number, met])
        if refused and case.cell.stage:
            played.build()
        else:
            played.back()
        number += int(every)
    return Found(got=[wrong, taken > 3, number > 50], right=[[], True, True])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)
