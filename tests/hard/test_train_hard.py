"""Hard use of the training scripts: killed at random, for thousands of windows, on a disk that fills up.

`make test-hard` runs them. DS_PARITY_KILLS (100) and DS_PARITY_KILL_SEED (0) choose how often, and where.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import time

import pytest

from ds_parity.trace import read_trace
from tests.tools.hosts import TOOLS, Hosts
from tests.tools.started import READY, ROOT, Forked, Started, trained_on

pytestmark = pytest.mark.timeout(7200)

KILLS, SEED = (
    int(os.environ.get(name, usual)) for name, usual in (("DS_PARITY_KILLS", 100), ("DS_PARITY_KILL_SEED", 0))
)
CASES = [
    ("train_grpo.py", "zero2_bf16.json", {}),
    ("train_grpo.py", "zero3_bf16_lookahead.json", {"max_tokens": 48, "ds_parity": {"lookahead": 2}}),
    ("train_dpo.py", "zero0_fp32.json", {}),
    ("train_grpo.py", "zero1_bf16_fp32_accumulation.json", {}),
    ("train_grpo.py", "zero2_bf16_cosine_by_rollout.json", {}),
]
STEPS = 60
BY_LAUNCHER = 0.05  # of the starts; the others are forked, which is ten times faster


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """What forked ranks inherit, and where they find what is imported for all of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def case(folder, number):
    """What every start of a case is given: a schedule that is not over before the run is."""
    script, ready, changes = CASES[number]
    config = json.loads((READY / ready).read_text())
    if "total_num_steps" in config["scheduler"]["params"]:
        config["scheduler"]["params"]["total_num_steps"] = 10 * STEPS
    config["ds_parity"] = config.get("ds_parity", {}) | changes.get("ds_parity", {})
    path = folder / f"case{number}.json"
    path.write_text(json.dumps(config))
    tokens = str(changes.get("max_tokens", 96))
    return {"script": script, "config": path}, ["--steps", str(STEPS), "--max_tokens", tokens]


def killed_run(folder, how, options, rng, counts):
    """Start, kill, start again, until it comes to its end."""
    while True:
        save = ["--save_every", str(rng.choice((1, 2, 5))), "--keep", str(rng.choice((1, 3))), "--resume"]
        start = Started if rng.random() < BY_LAUNCHER else Forked
        with start(folder, counts["starts"], *options, *save, **how) as run:
            counts["starts"] += 1
            counts["by the launcher"] += start is Started
            if counts["kills"] < KILLS and kill_once(run, rng, counts):
                continue
            assert run.wait(600) == 0, run.said()
            return


def kill_once(run, rng, counts):
    """kill -9 one rank: now and then while it starts, else some time after its first pass. Whether it came to that."""
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 12 if type(run) is Started else 4))
        where = "starting"
    else:
        noted = run.folder / "rank0.jsonl"
        before = noted.stat().st_size if noted.exists() else 0
        run.until(lambda: noted.exists() and noted.stat().st_size > before)
        time.sleep(rng.uniform(0, 1.5))
        where = "training"
    if not run.kill(rng.randrange(2)):
        return False
    checkpoints = run.folder / "out" / "checkpoints"
    latest = (checkpoints / "latest").read_text() if (checkpoints / "latest").exists() else "step0"
    unfinished = any(int(path.name[4:]) > int(latest[4:]) for path in checkpoints.glob("step*"))
    for name in ("kills", where, *["an unfinished checkpoint there"] * unfinished):
        counts[name] += 1
    return True


def test_a_run_that_is_killed_at_random_leaves_the_trace_of_one_that_never_was(tmp_path, capsys):
    """Bit for bit, and every rollout trained on as often."""
    rng, wholes, runs = random.Random(SEED), {}, 0
    counts = dict.fromkeys(
        ("starts", "by the launcher", "kills", "starting", "training", "an unfinished checkpoint there"), 0
    )
    while counts["kills"] < KILLS:
        number = (SEED + runs) % len(CASES)
        how, options = case(tmp_path, number)
        if number not in wholes:
            wholes[number] = tmp_path / f"whole{number}"
            with Forked(wholes[number], 0, *options, **how) as run:
                assert run.wait(600) == 0, run.said()
        folder = tmp_path / f"killed{runs}"
        killed_run(folder, how, options, rng, counts)
        whole, killed = (where / "out" / "trace.jsonl" for where in (wholes[number], folder))
        assert len(read_trace(whole).steps) == STEPS
        assert killed.read_bytes() == whole.read_bytes(), f"case {number}, {counts}"
        assert trained_on(folder) == trained_on(wholes[number]), f"case {number}, {counts}"
        runs += 1
        with capsys.disabled():
            print(f"\n{runs} runs of {STEPS} steps bit for bit the same: {counts}", flush=True)


def test_two_thousand_windows_take_no_more_memory_than_five_hundred(tmp_path, capsys):
    config = json.loads((READY / "zero2_bf16.json").read_text())
    config["gradient_accumulation_passes"] = 4
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = ["--steps", "2000", "--save_every", "100", "--max_tokens", "64"]
    seen = []
    with Started(tmp_path / "soak", 0, *options, config=path) as run:
        for steps in range(100, 2001, 100):
            run.until(lambda enough=steps: run.steps() >= enough, 600)
            seen.append([process.memory_info().rss for process in run.ranks().values()] if steps < 2000 else [])
        assert run.wait(60) == 0, run.said()
    early, late = seen[4], seen[-2]
    with capsys.disabled():
        print(
            f"\nresident MB after 100, 500, 1,000, 1,900 steps: {[[n >> 20 for n in seen[i]] for i in (0, 4, 9, 18)]}"
        )
    assert len(early) == len(late) == 2
    assert all(now - then < 8 << 20 for then, now in zip(early, late, strict=True))


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with an sshd each."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(
            f"two hosts on this machine need root and {', '.join(TOOLS)} (missing: {', '.join(missing) or 'root'})"
        )
    folder = tmp_path / "hosts"
    folder.mkdir()
    with Hosts(folder) as made:
        yield made


def test_a_run_on_two_hosts_that_is_killed_on_one_of_them_goes_on(tmp_path, hosts):
    """Started once with a hostfile; its trace is that of a run on one machine."""
    options = ["--steps", "20", "--save_every", "2", "--resume"]
    with Started(tmp_path / "one", 0, *options) as run:
        assert run.wait(200) == 0, run.said()
    folder = tmp_path / "two"
    with Started(folder, 0, *options, hosts=hosts) as run:
        assert run.until(lambda: run.steps() >= 5), run.said()
        hosts.ranks(1)[0].kill()
        assert run.wait(60) not in (0, None), run.said()
    with Started(folder, 1, *options, hosts=hosts) as run:
        assert run.wait(200) == 0, run.said()
    assert (folder / "out" / "trace.jsonl").read_bytes() == (tmp_path / "one" / "out" / "trace.jsonl").read_bytes()
    assert trained_on(folder) == trained_on(tmp_path / "one")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 8 kB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", path], check=False).returncode:
        pytest.skip("only root may mount the small disk that this fills")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_disk_that_fills_up_while_the_trace_is_written_stops_no_training_and_is_said_once(tmp_path, small_disk):
    config = json.loads((READY / "zero2_bf16.json").read_text())
    config["ds_parity"]["trace"] = str(small_disk / "trace.jsonl")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with Started(tmp_path / "full", 0, "--steps", "40", config=path) as run:
        assert run.wait(200) == 0, run.said()
    log = run.log.read_text()
    assert log.count("the trace ends here, training goes on") == 1
    assert "No space left on device" in log
    assert "step 40: loss" in log
    left = read_trace(small_disk / "trace.jsonl").steps
    assert 1 < len(left) < 40, "the disk was never full"
    with contextlib.suppress(FileNotFoundError):
        assert (tmp_path / "full" / "out" / "checkpoints" / "latest").read_text() == "step40"
