"""Fifty random faults while train_online.py trains: every rollout is stepped once, or it is said what became of it."""

import contextlib
import random
import re
import shutil
import signal
import time
from collections import Counter

import psutil
import pytest
from online.account import account
from online.queues import QueueError, open_queue

from ds_parity.trace import read_trace
from tests.tools.conftest import served
from tests.tools.online_runs import OnlineRun, small_disk, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]

SEED = 17
BETWEEN = 8
"""Steps that a run may take between two faults."""


@pytest.fixture
def counts(capsys):
    """What was done, how often; printed at the end."""
    found = Counter()
    yield found
    with capsys.disabled():
        print(f"\n{dict(sorted(found.items()))}", flush=True)


def checked(run, counts, queue="folder", *, keeps=True):
    """The account of a run, whatever has ended it; `keeps`: whether its queue can't have lost anything."""
    try:
        opened = open_queue(queue, run.output / "queue", (run.output / "run").read_text())
    except (QueueError, FileNotFoundError):
        opened = None
    found = account(run.output, opened)
    assert not found.twice, f"{found.twice}: trained on twice, {run.said()}"
    assert not found.again or not keeps, f"{found.again}: in the weights, and waiting, {run.said()}"
    if opened is not None and keeps:
        assert not found.lost, f"{found.lost}: lost without a word, {run.said()}"
    counts["accounts checked"] += 1
    return found


def ended(run, counts, queue="folder", *, keeps=True):
    """A run to its end: all steps are there, and its last word is the account."""
    assert run.wait(300) == 0, run.said()
    found = checked(run, counts, queue, keeps=keeps)
    steps = read_trace(run.trace).steps
    assert [one.step for one in steps] == list(range(1, len(steps) + 1))
    assert sorted(found.steps) == [one.step for one in steps]
    assert [4 * len(found.steps[one.step]) for one in steps] == [one.rollouts for one in steps]
    assert not found.claimed
    assert found.says() in run.said()
    counts["groups produced"] += found.produced
    counts["groups stepped once"] += len(found.stepped)
    counts["groups dropped by lag"] += len(found.dropped)
    counts["groups waiting at the end"] += len(found.waiting)
    counts["groups lost, and said"] += len(found.lost)
    return found


def options(steps, *more):
    return ["--steps", steps, "--save_every", 3, "--resume", "--actors", 2, *more]


def test_trainers_are_killed_and_runs_are_stopped(tmp_path, counts):
    """24 faults: a rank is killed, or a rank gets SIGTERM, wherever the run is then; each start goes on with it."""
    rng, folder, faults, target = random.Random(SEED), tmp_path / "run", 0, 0
    while faults < 24:
        target += rng.randint(1, BETWEEN)
        with OnlineRun(folder, *options(1000)) as run:
            if rng.random() < 0.9:
                run.until(target)
            time.sleep(rng.random() * 0.5)
            process, kill = rng.choice(run.processes), faults % 2 == 0
            with contextlib.suppress(ProcessLookupError):
                (psutil.Process(process.pid).send_signal)(signal.SIGKILL if kill else signal.SIGTERM)
            code = run.wait(60)
            assert code is not None, run.said()
        checked(run, counts)
        # Before a rank has its handler, SIGTERM ends it as a kill does.
        counts["trainers killed" if kill else "SIGTERM, " + ("a clean stop" if code == 0 else "while starting")] += 1
        target, faults = max(run.steps(), 0), faults + 1
    with OnlineRun(folder, *options(max(run.steps(), 0) + 5)) as run:
        ended(run, counts)


def test_actors_are_killed_and_the_run_goes_on(tmp_path, counts):
    """16 faults in one run: it takes no harm, and says who took whose place."""
    rng = random.Random(SEED)
    with OnlineRun(tmp_path / "run", *options(100000)) as run:
        assert run.until(2), run.said()
        for _ in range(16):
            assert wait_until(lambda: len(run.actors()) == 2, 60), run.said()
            time.sleep(rng.random())
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(run.actors()).kill()
            counts["actors killed"] += 1
            assert run.until(run.steps() + 2), run.said()
        run.processes[0].terminate()
        ended(run, counts)
    assert (
        len(re.findall(r"was ended by SIGKILL; a\d\.\d+ takes its place", (run.folder / "log.txt").read_text())) == 16
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_redis_is_killed(tmp_path, counts, keeps):
    """3 faults each: the run ends with a clear error, and goes on with --resume; what Redis has not kept is named."""
    rng, port, steps = random.Random(SEED), None, 0
    for _ in range(3):
        with served(tmp_path, port, keeps=keeps) as (server, address):
            port = int(address.rsplit(":", 1)[1])
            with OnlineRun(tmp_path / "run", *options(1000, "--queue", address)) as run:
                assert run.until(steps + rng.randint(2, BETWEEN)), run.said()
                server.kill()
                server.wait()
                assert run.wait(60), run.said()
                assert "does not answer as it should" in run.said()
            counts["Redis killed, appendonly " + ("on" if keeps else "off")] += 1
            checked(run, counts, address, keeps=keeps)
            steps = run.steps()
    last = options(steps + 5, "--queue", address)
    with served(tmp_path, port, keeps=keeps), OnlineRun(tmp_path / "run", *last) as run:
        found = ended(run, counts, address, keeps=keeps)
    assert bool(found.lost) is not keeps
    assert f"{len(found.lost)} lost" in run.said()


def test_the_disk_is_full(tmp_path, counts):
    """4 faults: the run ends with a clear error, and with --resume it goes on and finds everything."""
    rng, steps = random.Random(SEED), 0
    with small_disk(tmp_path / "disk", "24m") as disk:
        if disk is None:
            pytest.skip("needs a small disk of its own, which only root may mount")
        folder, output = tmp_path / "run", str(disk / "out")
        for _ in range(4):
            filler = disk / "filler"
            with OnlineRun(folder, *options(1000), output=output) as run:
                assert run.until(steps + rng.randint(2, BETWEEN)), run.said()
                with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
                assert run.wait(60), run.said()
                assert re.search("No space left on device|could not be written", run.said()), run.said()
            filler.unlink()
            counts["disk full"] += 1
            checked(run, counts)
            steps = max(run.steps(), 0)
        with OnlineRun(folder, *options(steps + 5), output=output) as run:
            ended(run, counts)
        shutil.rmtree(output)
