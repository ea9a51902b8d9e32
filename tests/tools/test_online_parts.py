"""The parts of train_online.py, without ranks: the queue's promises, the account, the task, the replay's loss."""

import io
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections import deque
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from online import task
from online.account import Ledger, account, gaps
from online.actor import Actor
from online.arrivals import Arrivals, Patience, micro_batch
from online.held import _why_not
from online.queues import QueueError, open_queue
from online.replay import window_loss, windows
from online.settled import Settled, expanded, ranges

from ds_parity.losses import GroupRelativePolicy

SCRIPTS = Path(__file__).parents[2] / "tools"


@pytest.fixture(params=["folder", "redis"])
def opened(request, tmp_path):
    """Opens one queue, again and again, as processes do."""
    address = "folder" if request.param == "folder" else request.getfixturevalue("redis_server")
    return lambda: open_queue(address, tmp_path / "queue", "a run")


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def group(number, actor="a0.1", version=0):
    return {"id": f"{actor}-{number}", "version": version, "prompt": "1+2=", "answers": [[4, 13], [5, 13]]} | {
        "logps": [[-0.5, -0.1], [-1.0, -0.2]],
        "rewards": [1.0, 0.0],
    }


class TestQueue:
    def test_groups_come_out_as_they_went_in_the_oldest_first_and_once(self, opened):
        for number in range(5):
            opened().push(group(number))
        assert opened().waiting() == [f"a0.1-{n}" for n in range(5)]
        ranks = [opened(), opened()]
        got = [ranks[n % 2].claim(n % 2) for n in range(6)]
        assert got == [*(group(n) for n in range(5)), None]
        assert opened().claimed() == {f"a0.1-{n}": n % 2 for n in range(5)}

    def test_what_two_ranks_claim_at_once_goes_to_one_of_them(self, opened):
        for number in range(200):
            opened().push(group(number))
        got = [[], []]

        def claims(rank):
            queue = opened()
            while (one := queue.claim(rank)) is not None:
                got[rank].append(one["id"])

        threads = [threading.Thread(target=claims, args=(rank,)) for rank in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert sorted(got[0] + got[1]) == sorted(f"a0.1-{n}" for n in range(200))

    def test_settled_groups_are_gone_and_others_wait_again_in_front(self, opened):
        for number in range(4):
            opened().push(group(number))
        queue = opened()
        for _ in range(3):
            queue.claim(1)
        opened().settle(1, ["a0.1-1"])
        opened().give_back(1, ["a0.1-0", "a0.1-2"])
        assert opened().waiting() == ["a0.1-0", "a0.1-2", "a0.1-3"]
        assert opened().claimed() == {}
        assert opened().claim(0) == group(0)

    @pytest.mark.parametrize("content", ['{"id": "a0.1-0", "vers', "[]", "{}"])
    def test_a_file_that_is_no_whole_group_is_named(self, tmp_path, content):
        queue = open_queue("folder", tmp_path / "queue", "a run")
        queue.push(group(0))
        (path,) = (tmp_path / "queue" / "waiting").iterdir()
        path.write_text(content)
        with pytest.raises(QueueError, match=r"claimed/1/.*a0\.1-0\.json is no whole group .*take the file away"):
            queue.claim(1)

    def test_weights_are_replaced_and_read_once(self, opened):
        queue = opened()
        assert queue.newest(-1) is None
        queue.publish(3, b"three")
        assert opened().newest(-1) == (3, b"three")
        assert opened().newest(3) is None
        opened().publish(0, b"older, of a run that was resumed")
        assert queue.newest(3) == (0, b"older, of a run that was resumed")

    def test_weights_that_are_withdrawn_are_gone_until_the_next(self, opened):
        queue = opened()
        queue.withdraw()
        queue.publish(3, b"three")
        opened().withdraw()
        assert queue.newest(-1) is None
        opened().publish(3, b"three again")
        assert queue.newest(-1) == (3, b"three again")

    def test_it_knows_which_weights_have_sampled_what_is_not_settled(self, opened):
        queue = opened()
        for number, version in enumerate((2, 3, 3, 4)):
            queue.push(group(number, version=version))
        queue.push(group(0, actor="a0.2", version=4))
        queue.push(group(0, actor="a00.1", version=4))
        for rank in (0, 1, 0):
            queue.claim(rank)
        queue.settle(1, ["a0.1-1"])
        assert sorted(opened().versions("a0")) == [2, 3, 4, 4]
        assert opened().versions("a1") == []

    def test_what_is_claimed_meanwhile_is_counted_once(self, opened, monkeypatch):
        queue = opened()
        queue.push(group(0, version=3))
        claimed = queue.claimed if hasattr(queue, "_server") else queue._names

        def between(*args):
            opened().claim(1)
            return claimed(*args)

        monkeypatch.setattr(queue, claimed.__name__, between)
        assert queue.versions("a0") == [3]

    def test_another_run_on_the_same_server_sees_nothing_of_it(self, redis_server, tmp_path):
        open_queue(redis_server, tmp_path, "one").push(group(0))
        assert open_queue(redis_server, tmp_path, "another").waiting() == []


def test_a_server_that_is_not_there_and_a_queue_that_is_none_are_named(tmp_path):
    with pytest.raises(QueueError, match=r"redis://127.0.0.1:1 does not answer"):
        open_queue("redis://127.0.0.1:1", tmp_path, "a run")
    with pytest.raises(QueueError, match="must be redis://HOST:PORT, or folder"):
        open_queue("kafka://somewhere", tmp_path, "a run")


def test_a_push_onto_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("needs a small disk of its own, which only root may mount")
    try:
        queue = open_queue("folder", tmp_path / "queue", "a run")
        with pytest.raises(QueueError, match="No space left on device"):
            deque(map(queue.push, map(group, range(1000))), maxlen=0)
        waiting = queue.waiting()
        assert waiting == [f"a0.1-{n}" for n in range(len(waiting))]
        assert 0 < len(waiting) < 1000
        assert queue.claim(0) == group(0), "what had arrived can be claimed on a full disk"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


class TestAccount:
    @pytest.fixture
    def made(self, tmp_path):
        """A queue of ten groups, of which an actor says that it has pushed them; and the ledgers of two ranks."""
        queue = open_queue("folder", tmp_path / "queue", "a run")
        (tmp_path / "actors").mkdir()
        for number in range(10):
            queue.push(group(number))
        (tmp_path / "actors" / "a0.1.log").write_text("".join(f"{n} {n // 4}\n" for n in range(10)))
        return tmp_path, queue, [Ledger(tmp_path, rank) for rank in range(2)]

    def steps(self, queue, ledgers, step):
        for rank, ledger in enumerate(ledgers):
            ledger.passed([queue.claim(rank)])
            ledger.stepped(step)

    def test_every_group_is_in_one_place(self, made):
        folder, queue, ledgers = made
        self.steps(queue, ledgers, 1)
        old = queue.claim(0)
        ledgers[0].dropped(old, 9)
        queue.settle(0, [old["id"]])
        queue.claim(1)
        found = account(folder, queue)
        assert found.says() == (
            "account: 10 groups produced: 2 stepped in 1 windows, 1 dropped by their lag, 6 waiting, 1 claimed and not "
            "stepped, 0 lost, 0 stepped twice"
        )

    def test_steps_that_are_not_in_the_weights_of_a_resumed_run_do_not_count(self, made):
        folder, queue, ledgers = made
        self.steps(queue, ledgers, 1)
        self.steps(queue, ledgers, 2)
        for rank, ledger in enumerate(ledgers):
            ledger.resumed(1)
            queue.give_back(rank, [f"a0.1-{2 + rank}"])
        assert len(account(folder, queue).waiting) == 8
        self.steps(open_queue("folder", folder / "queue", "a run"), ledgers, 2)
        found = account(folder, queue)
        assert found.steps == {1: ["a0.1-0", "a0.1-1"], 2: ["a0.1-2", "a0.1-3"]}
        assert not found.twice

    def test_what_is_trained_on_twice_and_what_is_lost_is_found(self, made):
        folder, queue, ledgers = made
        ledgers[0].passed([group(0)])
        ledgers[0].stepped(1)
        ledgers[1].passed([group(0)])
        ledgers[1].stepped(1)
        queue.claim(0)
        queue.settle(0, ["a0.1-0"])
        queue.claim(0)
        queue.settle(0, ["a0.1-1"])
        found = account(folder, queue)
        assert (found.twice, found.lost) == ({"a0.1-0"}, {"a0.1-1"})
        assert account(folder, None).lost == {f"a0.1-{n}" for n in range(1, 10)}, "a queue that is gone"

    def test_a_line_that_a_kill_has_cut_is_left_out(self, made):
        folder, queue, ledgers = made
        self.steps(queue, ledgers, 1)
        with (folder / "ledger" / "rank0.jsonl").open("a") as file:
            file.write('{"step": 2, "step')
        again = Ledger(folder, 0)
        again.resumed(1)
        assert account(folder, queue).steps == {1: ["a0.1-0", "a0.1-1"]}

    def test_numbers_that_must_have_been_are_missed(self):
        assert gaps(["a0.1-0", "a0.1-3", "a1.1-1"]) == {"a0.1-1", "a0.1-2", "a1.1-0"}

    @pytest.mark.parametrize("cut", ["1", "11", "11 ", "11 3"])
    def test_a_line_that_is_cut_in_an_actors_log_counts_as_pushed(self, made, cut):
        folder, queue, _ = made
        queue.push(group(10))
        with (folder / "actors" / "a0.1.log").open("a") as file:
            file.write("10 2\n" + cut)
        assert account(folder, queue).lost == {"a0.1-11"}, "the queue of this test does not have it"

    def test_what_waits_though_it_is_in_the_weights_is_said(self, made):
        folder, queue, ledgers = made
        self.steps(queue, ledgers, 1)
        queue.give_back(0, ["a0.1-0"])
        found = account(folder, queue)
        assert found.again == {"a0.1-0"}
        assert found.says().endswith("0 stepped twice, 1 stepped and waiting again")

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks_that_a_resumed_run_has_no_more_keep_no_lost_steps(self, made, ranks):
        folder, queue, _ = made
        ledgers = [Ledger(folder, rank, keep=True) for rank in range(2)]
        for step in (1, 2):
            self.steps(queue, ledgers, step)
        for rank in range(min(ranks, 2)):
            ledgers[rank].resumed(1)
        Ledger(folder, 0).resumed_with(ranks, 1)
        for rank in range(2):
            queue.give_back(rank, [f"a0.1-{2 + rank}"])
        found = account(folder, queue)
        assert found.steps == {1: ["a0.1-0", "a0.1-1"]}
        assert (len(found.waiting), found.again, found.lost) == (8, set(), set())
        assert {step: len(held) for step, held in windows(folder).items()} == {1: 4}
        assert not (folder / "ledger" / "rank2.jsonl").exists()


def test_ranges_of_ids_and_back():
    ids = {"a0.1-0", "a0.1-1", "a0.1-2", "a0.1-7", "a1.2-5"}
    assert ranges(ids) == {"a0.1": [[0, 2], [7, 7]], "a1.2": [[5, 5]]}
    assert expanded(ranges(ids)) == ids


@pytest.fixture(scope="module")
def sampled():
    """A policy, and groups that another one has sampled."""
    older, policy = task.build(1), task.build(1)
    with torch.no_grad():
        for one in policy.parameters():
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
    numbers, generator = random.Random(0), torch.Generator().manual_seed(0)
    groups = []
    for number in range(6):
        prompt = task.problem(numbers, 99)
        answers, logps = task.generate(older, [prompt] * 8, generator)
        rewards = [float(len(answer) % 2) for answer in answers]
        groups.append({"id": f"a-{number}", "version": 0, "prompt": prompt, "answers": answers} | {"logps": logps})
        groups[-1]["rewards"] = rewards
    return older, policy, groups


class TestTask:
    def test_the_reward_is_for_the_right_sum_that_ends(self):
        assert [task.reward("7+58=", answer) for answer in ("65;", "65", "66;", "65;;", "")] == [1, 0, 0, 0, 0]

    def test_a_policy_gives_what_it_has_sampled_the_log_probabilities_that_it_says(self, sampled):
        older, _, groups = sampled
        batch = micro_batch(groups, 2)
        logps = GroupRelativePolicy(older).logps(batch.inputs["input_ids"])
        mask = batch.inputs["loss_mask"] > 0
        assert torch.allclose(logps[mask], batch.inputs["sampled_logps"][mask], rtol=0, atol=1e-5)
        assert {one.lag for one in batch.held} == {2}
        assert (batch.rollouts, batch.prompts) == (48, 6)


@pytest.mark.parametrize(("norm", "cap", "kl"), [("token", None, 0.0), ("rollout", 1.3, 0.1), ("dr_grpo", None, 0.1)])
def test_the_loss_of_the_replay_is_that_of_the_library(sampled, norm, cap, kl):
    older, policy, groups = sampled
    batch = micro_batch(groups, 0)
    unit = "token" if norm == "token" else "rollout"
    length = task.LONGEST if norm == "dr_grpo" else None
    loss = GroupRelativePolicy(policy, unit, clip_high=0.28, ratio_cap=cap, length=length)
    with torch.no_grad():
        reference = GroupRelativePolicy(older).logps(batch.inputs["input_ids"])
    value, apart, cut = loss(**batch.inputs, reference_logps=reference)
    given = {"norm": norm, "cap": cap, "kl": kl, "clip_low": 0.2, "clip_high": 0.28, "reference": older.double()}
    assert cut.mean() > 0
    with torch.no_grad():
        replayed, means = window_loss(policy.double(), list(batch.held), given)
    assert replayed.item() == pytest.approx((value + kl * apart).item(), rel=1e-4)
    assert means["clipped"] == pytest.approx(cut.mean().item(), rel=1e-5)
    older.float(), policy.float()


class Window:
    def __init__(self):
        self.index = 0


class Engine:
    def __init__(self):
        self.window = Window()


class TestArrivals:
    def arrivals(self, tmp_path, **changed):
        usual = {"steps": 9, "micro_batch": 4, "group": 2, "wait": 0.01, "max_lag": 2, "old": "drop", "sync": False}
        queue, ledger, engine = open_queue("folder", tmp_path / "queue", "a run"), Ledger(tmp_path, 0), Engine()
        more = {name: changed.pop(name) for name in ("quota", "contained", "watch") if name in changed}
        return engine, queue, Arrivals(queue, ledger, Namespace(**{**usual, **changed}), 0, engine, **more)

    def test_a_micro_batch_is_what_has_arrived_and_a_rank_without_is_idle(self, tmp_path):
        _, queue, arrivals = self.arrivals(tmp_path)
        for number in range(3):
            queue.push(group(number))
        stream = iter(arrivals)
        got = [next(stream) for _ in range(3)]
        assert [one.rollouts for one in got] == [4, 2, 0]
        assert [one.idle for one in got] == [False, False, True]
        assert arrivals.waited > 0.005

    def test_old_groups_are_dropped_and_written_down(self, tmp_path):
        engine, queue, arrivals = self.arrivals(tmp_path)
        engine.window.index = 5
        for number, version in enumerate((2, 3, 5)):
            queue.push(group(number, version=version))
        assert [one.prompt_id for one in next(iter(arrivals)).held] == ["a0.1-1"] * 2 + ["a0.1-2"] * 2
        assert account(tmp_path, queue).dropped == {"a0.1-0"}

    def test_or_they_are_kept_and_counted(self, tmp_path):
        engine, queue, arrivals = self.arrivals(tmp_path, old="clip")
        engine.window.index = 5
        queue.push(group(0, version=0))
        assert next(iter(arrivals)).held[0].lag == 5
        assert arrivals.over == 1

    @pytest.mark.parametrize("old", ["drop", "clip"])
    def test_in_step_with_its_actors_nothing_is_as_old_as_one_window(self, tmp_path, old):
        engine, queue, arrivals = self.arrivals(tmp_path, sync=True, old=old)
        engine.window.index = 5
        for number, version in enumerate((4, 6, 5)):
            queue.push(group(number, version=version))
        assert {one.prompt_id for one in next(iter(arrivals)).held} == {"a0.1-2"}
        assert account(tmp_path, queue).dropped == {"a0.1-0", "a0.1-1"}
        assert arrivals.dropped == 2
        with pytest.raises(
            QueueError, match=r"no rollout has arrived.*; 2 groups were dropped: their lag was above --max_lag"
        ):
            Patience(0).check(arrivals.dropped)

    def test_what_is_in_the_weights_is_not_trained_on_again_wherever_it_comes_from(self, tmp_path):
        _, queue, arrivals = self.arrivals(tmp_path, contained={"a0.1-0"})
        for number in range(2):
            queue.push(group(number))
        assert {one.prompt_id for one in next(iter(arrivals)).held} == {"a0.1-1"}
        assert queue.claimed().keys() == {"a0.1-1"}

    def test_a_quota_ends_with_its_window(self, tmp_path):
        watched = []
        engine, queue, arrivals = self.arrivals(tmp_path, quota=6, watch=lambda: watched.append(1))
        for number in range(6):
            queue.push(group(number))
        stream = iter(arrivals)
        assert [next(stream).rollouts for _ in range(2)] == [4, 2]
        assert not watched
        assert next(stream).idle
        assert watched, "another rank may wait for an actor that is gone"
        engine.window.index = 1
        assert next(stream).rollouts == 4

    def test_the_stream_ends_with_the_last_step(self, tmp_path):
        engine, _, arrivals = self.arrivals(tmp_path)
        engine.window.index = 9
        assert list(arrivals) == []


class TestInStep:
    """Each window is trained on what its own weights have sampled, behind a kill, too."""

    def actor(self, tmp_path, queue, name):
        given = {"seed": 0, "group": 2, "batch": 8, "largest": 9, "room": 1, "each": 4, "rest": 0.0, "parent": None}
        return Actor(Namespace(output=tmp_path, name=name, **given), queue)

    def weights(self):
        content = io.BytesIO()
        torch.save(task.build(0).state_dict(), content)
        return content.getvalue()

    def wanted(self, actor):
        actor._take_weights()
        return actor._wanted()

    def test_an_actor_samples_what_its_lives_have_not(self, tmp_path, opened):
        queue, weights = opened(), self.weights()
        first = self.actor(tmp_path, queue, "a0.1")
        assert self.wanted(first) == 0
        queue.publish(0, weights)
        assert self.wanted(first) == 4
        for one in first._groups(3):
            first._push(one)
        assert self.wanted(first) == 1
        queue.claim(0)
        # It was killed before it had written down its last.
        second = self.actor(tmp_path, queue, "a0.2")
        assert self.wanted(second) == 1
        for version in (1, 2):
            queue.publish(version, weights)
            assert self.wanted(second) == 4
        for one in second._groups(4):
            second._push(one)
        assert self.wanted(second) == 0
        second.args.each = 2
        assert self.wanted(second) == 0
        second.args.each = 4
        # Back to other weights, of which one group is left; and to some of which a group was taken away.
        queue.withdraw()
        queue.publish(0, weights)
        queue.settle(0, ["a0.1-0"])
        queue.claim(1)
        queue.settle(1, ["a0.1-1"])
        assert self.wanted(second) == 3

    def test_what_lost_weights_have_sampled_is_dropped_where_a_run_goes_on(self, tmp_path, opened, alone):
        queue, ledger = opened(), Ledger(tmp_path, 0)
        for number, version in enumerate((4, 5, 5, 6, 5, 6)):
            queue.push(group(number, version=version))
        for rank in (0, 1, 0, 1):
            queue.claim(rank)
        settled = Settled(queue, ledger, 0)
        settled.resume({"stepped": {"a0.1": [[0, 0]]}}, 5, resumed=True, shares=[4], size=2)
        assert opened().waiting() == ["a0.1-1", "a0.1-2", "a0.1-4"]
        assert opened().claimed() == {}
        assert account(tmp_path, queue).dropped == {"a0.1-3", "a0.1-5"}
        assert opened().versions("a0") == [5, 5, 5]

    @pytest.mark.parametrize(
        ("shares", "size", "kept"),
        [
            ([4, 4], 2, ["a0.1-0", "a0.1-1", "a1.1-0"]),
            ([1, 4], 2, ["a0.1-0", "a1.1-0"]),
            ([4], 2, ["a0.1-0", "a0.1-1"]),
            ([4, 4], 3, []),
            ([], 2, ["a0.1-0", "a0.1-1", "a1.1-0"]),
        ],
    )
    def test_so_is_what_no_actor_of_this_run_would_sample(self, tmp_path, opened, alone, shares, size, kept):
        """With fewer actors, or groups of another size, than the run that was killed."""
        queue = opened()
        for number, actor in ((0, "a0.1"), (1, "a0.1"), (0, "a1.1")):
            queue.push(group(number, actor=actor, version=5))
        Settled(queue, Ledger(tmp_path, 0), 0).resume({}, 5, resumed=True, shares=shares, size=size)
        assert opened().waiting() == kept

    def test_and_kept_where_it_does_not_sample_in_step(self, tmp_path, opened, alone):
        queue, ledger = opened(), Ledger(tmp_path, 0)
        for number, version in enumerate((4, 5, 6)):
            queue.push(group(number, version=version))
        queue.claim(1)
        Settled(queue, ledger, 0).resume({}, 5, resumed=True, shares=None, size=2)
        assert opened().waiting() == ["a0.1-0", "a0.1-1", "a0.1-2"]


def test_an_account_of_a_folder_without_a_run_says_so(tmp_path):
    command = [sys.executable, SCRIPTS / "online" / "account.py", "--output", tmp_path / "none"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"{tmp_path / 'none'} holds no run (it has no file 'run'): give --output the folder of one\n"


def test_a_folder_is_held_until_its_process_ends(tmp_path):
    """A child that outlives it holds nothing."""
    code = "import subprocess, sys; from pathlib import Path; from online.held import _why_not; "
    code += "print(_why_not(Path(sys.argv[1]))); subprocess.Popen(['sleep', '60']); print('held', flush=True); input()"
    path, environment = tmp_path / "lock", os.environ | {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"}
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as first:
        try:
            assert [first.stdout.readline() for _ in range(2)] == ["None\n", "held\n"]
            assert f"still trains (its first rank is process {first.pid} on " in _why_not(path)
            child = psutil.Process(first.pid).children()[0]
        finally:
            first.kill()
    first.wait()
    try:
        assert _why_not(path) is None
    finally:
        child.kill()


def test_a_folder_in_which_nothing_can_be_kept_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "file").touch()
    assert _why_not(tmp_path / "lock") == (
        "can't be held for this run: lock: Is a directory; give a folder of your own as --output"
    )
    assert _why_not(tmp_path / "file" / "lock").startswith("can't be held for this run: lock: ")


def test_so_is_one_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("online.held.socket.gethostname", lambda: "x" * 100_000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        assert _why_not(tmp_path / "lock").startswith("can't be held for this run: lock: File too large; give")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
