"""tools/train_grpo.py as a user starts it: a run that is killed, stopped and resumed is one that never was."""

import json
import random
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from ds_parity.trace import read_trace
from tests.tools.started import READY, ROOT, Started, trained_on

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, TARGET, ROLLOUTS = 11, 12, 112
CONFIG = ["--deepspeed_config", str(READY / "zero2_bf16.json")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    with Started(folder, 0, "--steps", str(STEPS), "--monitor", "csv") as run:
        assert run.wait(120) == 0, run.said()
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run whose rank is killed, then one that is asked to stop, then one to the end; a checkpoint every two steps."""
    folder = tmp_path_factory.mktemp("broken")
    options = ["--steps", str(STEPS), "--save_every", "2", "--resume", "--monitor", "csv"]
    with Started(folder, 0, *options) as run:
        assert run.until(lambda: run.steps() >= 3), run.said()
        run.kill(random.Random(0).randrange(2))
        killed = run.steps(), (folder / "out" / "checkpoints" / "latest").read_text()
    with Started(folder, 1, *options) as run:
        assert run.until(lambda: (folder / "rank0.jsonl").read_text().count('"attempt": 1') > 2), run.said()
        run.ranks()[1].send_signal(signal.SIGTERM)
        assert run.wait(60) == 0, run.said()
        stopped = run.steps(), (folder / "out" / "checkpoints" / "latest").read_text(), run.said()
    with Started(folder, 2, *options) as run:
        assert run.wait(120) == 0, run.said()
    return folder, killed, stopped


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--deepspeed_config is missing"),
        (["--deepspeed_config", "none.json"], "none.json"),
        (["--deepspeed_config", "plain.json"], "set gradient_accumulation_passes"),
        (["--deepspeed_config", "prompts.json"], "leave ds_parity.count at 'rollout'"),
        ([*CONFIG, "--rollouts", "none.jsonl"], "none.jsonl"),
        ([*CONFIG, "--model", "nowhere:build"], "'nowhere:build' does not name a function"),
        ([*CONFIG, "--steps", "0"], "--steps: it is 0, and must be at least 1"),
    ],
)
def test_bad_input_is_a_message_and_code_2(tmp_path, monkeypatch, capsys, options, says):
    """Before a process group is made: so it needs no ranks."""
    monkeypatch.chdir(tmp_path)
    keys = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    Path("plain.json").write_text(json.dumps(keys))
    Path("prompts.json").write_text(
        json.dumps({**keys, "gradient_accumulation_passes": 2, "ds_parity": {"count": "prompt"}})
    )
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *options])
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "tools" / "train_grpo.py"), run_name="__main__")
    assert says in capsys.readouterr().err


def test_every_step_holds_its_target(whole):
    steps = read_trace(whole / "out" / "trace.jsonl").steps
    assert [(one.step, one.rollouts) for one in steps] == [(n, TARGET) for n in range(1, STEPS + 1)]
    assert all(0 <= one.metrics["reward"] <= 1 for one in steps)


def test_every_rollout_is_trained_on_once_an_epoch(whole):
    trained = trained_on(whole)
    assert [sum(trained[window].values()) for window in range(STEPS)] == [TARGET] * STEPS
    times = sum(trained.values(), Counter())
    assert len(times) == ROLLOUTS
    assert sorted(set(times.values())) == [1, 2], "the run is an epoch and a bit"


def test_the_monitor_shows_the_loss_over_rollouts(whole):
    lines = (whole / "out" / "csv" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [str(n * TARGET) for n in range(1, STEPS + 1)]


def test_one_rank_that_gets_sigterm_stops_all_at_a_boundary_with_a_checkpoint(broken):
    _, (killed, _), (steps, latest, said) = broken
    assert 1 <= killed < STEPS
    assert 1 <= steps < STEPS
    assert latest == f"step{steps}"
    assert f"stopped after step {steps}; go on with --resume" in said


def test_the_trace_is_that_of_the_run_that_nothing_happened_to_byte_for_byte(whole, broken):
    folder, (_, latest), _ = broken
    assert latest.startswith("step")
    assert (folder / "out" / "trace.jsonl").read_bytes() == (whole / "out" / "trace.jsonl").read_bytes()


def test_no_rollout_is_lost_or_trained_on_twice(whole, broken):
    assert trained_on(broken[0]) == trained_on(whole)


def test_no_more_checkpoints_are_kept_than_asked_for(broken):
    kept = sorted(path.name for path in (broken[0] / "out" / "checkpoints").glob("step*"))
    assert kept == ["step10", "step11"]
