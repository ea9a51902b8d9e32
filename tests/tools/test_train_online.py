"""tools/train_online.py on two ranks: the rewards, the account and the replay of short runs, with either queue."""

import re
import runpy
import subprocess
import sys

import pytest
from online.account import account
from online.queues import open_queue
from online.replay import windows

from benchmarks.setups import launched
from ds_parity.trace import read_trace
from tests.tools.online_runs import SCRIPT, OnlineRun

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 12


def accounted(run, queue="folder"):
    """The account of a run that has ended."""
    return account(run.output, open_queue(queue, run.output / "queue", (run.output / "run").read_text()))


@pytest.fixture(params=["folder", "redis"])
def queue(request):
    return "folder" if request.param == "folder" else request.getfixturevalue("redis_server")


@pytest.mark.slow
def test_a_run_ends_with_every_rollout_accounted_for_and_a_picture(tmp_path, queue):
    with OnlineRun(tmp_path, "--steps", STEPS, "--queue", queue, "--kl", 0.02, "--save_every", 5) as run:
        assert run.wait(200) == 0, run.said()
    steps = read_trace(run.trace).steps
    assert [one.step for one in steps] == list(range(1, STEPS + 1))
    found = accounted(run, queue)
    assert (found.lost, found.twice, found.claimed) == (set(), set(), set())
    assert [4 * len(found.steps[one.step]) for one in steps] == [one.rollouts for one in steps]
    assert sum(one.rollouts for one in steps) >= 16 * STEPS
    for one in steps:
        assert 0 <= one.metrics["reward"] <= 1
        assert 0 <= one.metrics["lag"] <= 8
        assert one.metrics["kl"] >= 0
    assert max(one.metrics["lag"] for one in steps) > 0, "actors never fell behind: nothing of the lag was seen"
    assert found.says() in run.said()
    assert (run.output / "curve.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks_and_with_more(tmp_path):
    """Steps behind the checkpoint are lost on both ranks, also on the one that the resumed run has no more."""
    options = ["--save_every", 3, "--record", "--resume"]
    for ranks, until in ((2, 5), (1, 8)):
        with OnlineRun(tmp_path, "--steps", 1000, *options, ranks=ranks, stage=0) as run:
            assert run.until(until), run.said()
            run.processes[-1].kill()
            run.wait(60)
        found = accounted(run)
        assert (found.lost, found.twice, found.again) == (set(), set(), set())
    with OnlineRun(tmp_path, "--steps", STEPS, *options, ranks=2, stage=0) as run:
        assert run.wait(200) == 0, run.said()
    found, steps = accounted(run), read_trace(run.trace).steps
    assert (found.lost, found.twice, found.again, found.claimed) == (set(), set(), set(), set())
    assert sorted(found.steps) == [one.step for one in steps] == list(range(1, STEPS + 1))
    assert [4 * len(found.steps[one.step]) for one in steps] == [one.rollouts for one in steps]
    assert {step: len(held) for step, held in windows(run.output).items()} == {one.step: one.rollouts for one in steps}
    assert "resumed behind step" in run.said()


@pytest.mark.slow
def test_a_second_run_in_the_folder_of_one_that_still_trains_is_refused(tmp_path):
    """It would give back what the first one has claimed, and train on it, too."""
    with OnlineRun(tmp_path / "first", "--steps", 1000) as run:
        assert run.until(2), run.said()
        with OnlineRun(tmp_path / "second", "--steps", 1000, "--resume", output=run.output) as second:
            assert second.wait(100) not in (0, None), second.said()
            assert "is of a run that still trains (its first rank is process " in second.said()
            assert "Traceback" not in second.said()
            assert run.until(run.steps() + 3), run.said()


@pytest.mark.slow
def test_in_step_with_its_actors_it_has_no_lag_and_is_replayed_by_plain_torch(tmp_path):
    options = ["--steps", STEPS, "--sync", "--record", "--actors", 2, "--norm", "rollout", "--level", 0.2]
    with OnlineRun(tmp_path, *options) as run:
        assert run.wait(200) == 0, run.said()
    steps = read_trace(run.trace).steps
    assert {(one.rollouts, one.metrics["lag"]) for one in steps} == {(16, 0.0)}
    assert accounted(run).produced in range(4 * STEPS, 4 * STEPS + 5), "what the last weights have sampled waits"
    assert sum(one.grad_norm > 0 for one in steps) > STEPS / 2, "nothing was learned: nothing was compared"
    replayed(run, "--norm", "rollout")


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [8, 16])
def test_in_step_with_its_actors_it_goes_on_behind_kills_with_whole_windows_of_its_own(tmp_path, micro_batch):
    """What lost weights have sampled is not trained on, and what they had sampled comes anew."""
    options = ["--sync", "--record", "--actors", 2, "--save_every", 3, "--micro_batch", micro_batch, "--patience", 20]
    for until in (2, 5, 8):
        with OnlineRun(tmp_path, "--steps", 1000, "--resume", *options) as run:
            assert run.until(until), run.said()
            run.processes[until % 2].kill()
            run.wait(60)
    with OnlineRun(tmp_path, "--steps", STEPS, "--resume", *options) as run:
        assert run.wait(200) == 0, run.said()
    found, steps = accounted(run), read_trace(run.trace).steps
    assert (found.lost, found.twice, found.again, found.claimed) == (set(), set(), set(), set())
    assert [(one.step, one.rollouts, one.metrics["lag"]) for one in steps] == [
        (n, 16, 0.0) for n in range(1, STEPS + 1)
    ]
    assert found.dropped, "nothing was lost: no kill was behind what a checkpoint contains"


@pytest.mark.slow
def test_the_benchmark_changes_its_rule_from_block_to_block(tmp_path):
    calls = {"online": {"folder": str(tmp_path / "run"), "blocks": 3, "block": 2}}
    found = launched(tmp_path / "ranks", "benchmarks.online:measure", calls)["online"]
    assert [[quota for quota, *_ in blocks] for blocks in found] == [[False, True, False]] * 2


def replayed(run, *options):
    """Replay a run, and compare."""
    given = ["--output", run.output, "--deepspeed_config", run.folder / "small.json", *options]
    subprocess.run([sys.executable, SCRIPT.parent / "online" / "replay.py", *given], check=True)
    compared = subprocess.run(
        [sys.executable, "-m", "ds_parity", "compare", run.output / "replay.jsonl", run.trace],
        capture_output=True,
        text=True,
        check=False,
    )
    print(compared.stdout[-3000:])
    assert compared.returncode == 0, compared.stdout[-3000:]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--group", "7"], "--group 7: the target of 128 rollouts must be a multiple of it"),
        (["--group", "64"], "--micro_batch 16 no less: groups are not split"),
        (["--steps", "0"], "--steps: it is 0, and must be at least 1"),
        (["--group", "0"], "--group: it is 0, and must be at least 1"),
        (["--max_lag", "-1"], "--max_lag: it is -1, and must be at least 0"),
        (["--largest", "1000"], "--largest: it is 1000, and must be from 0 to 499"),
        (["--rest", "nan"], "--rest: it is nan, and must be at least 0"),
        (["--room", "few"], "--room: invalid int value: 'few'"),
        (["--seed", str(2**70)], f"--seed: it is {2**70}, and must be from -{2**63} to "),
    ],
)
def test_bad_input_is_a_message_and_code_2(tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_online.py", *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert re.search(re.escape(says), capsys.readouterr().err)
