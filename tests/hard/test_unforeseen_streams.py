"""Streams of any kind, and loops that leave passes() in any way, step as an fp64 oracle does, or are refused."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_parity
from ds_parity.losses import PolicyGradient
from tests.distributed.engines import from_all
from tests.hard.unforeseen.cells import CELLS, Cell, Found, Watched, distance, weights_of
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


def micro_batches(indices):
    """Of two rollouts each; the inputs are made where they are run."""
    return [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in indices]


def index_of(batch):
    return batch.inputs["index"]


def run(watched, stream, **options):
    """Run a stream as a usual loop does; returns the indices of the micro-batches that were no stand-ins."""
    indices = []
    for batch in watched.engine.passes(stream, **options):
        watched.engine.backward(watched.loss(index_of(batch)))
        watched.engine.step()
        if not getattr(batch, "idle", False):
            indices.append(index_of(batch))
    return indices


def noted(watched, counts):
    """Tell the oracle of streams of so many micro-batches on each rank."""
    for index in range(max(counts)):
        watched.noted(index, *(2 if index < count else 0 for count in counts))


class Own:
    """A micro-batch of a user's own class, with the names that passes() asks for."""

    def __init__(self, index):
        self.inputs, self.rollouts, self.prompts, self.tokens = {"index": index}, 2, 0, 0


class Slotted:
    """One that nothing can be added to, whose count is a tensor."""

    __slots__ = ("inputs", "prompts", "rollouts", "tokens")

    def __init__(self, index):
        self.inputs, self.rollouts, self.prompts, self.tokens = {"index": index}, torch.tensor(2), 0, 0


class Data(torch.utils.data.Dataset):
    """Micro-batches that a DataLoader reads, in workers too."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return micro_batches([index])[0]


def slow(count):
    """The second rank's data comes late."""
    for batch in micro_batches(range(count)):
        time.sleep(0.2 * dist.get_rank())
        yield batch


STREAMS = {
    "loader-of-workers": lambda count: torch.utils.data.DataLoader(Data(count), batch_size=None, num_workers=2),
    "loader": lambda count: torch.utils.data.DataLoader(Data(count), batch_size=None),
    "own-class": lambda count: [Own(index) for index in range(count)],
    "slots": lambda count: (Slotted(index) for index in range(count)),
    "slow": slow,
}
KINDS = {f"{name}-ahead-{ahead}": (made, ahead) for name, made in STREAMS.items() for ahead in (0, 2)}


@play.right([Cell(0), Cell(3)], KINDS)
def streams_of_other_kinds(case):
    """Four micro-batches on one rank and three on the other."""
    made, ahead = KINDS[case.variant]
    watched = Watched(case.cell)
    run(watched, made((4, 3)[watched.rank]), lookahead=ahead)
    noted(watched, (4, 3))
    return watched.found([watched.engine.global_samples], [14])


UNEVEN = {
    "ahead-0": ((5, 2), {"lookahead": 0}),
    "ahead-1": ((6, 1), {"lookahead": 1}),
    "ahead-4": ((6, 1), {"lookahead": 4}),
    "handed-out": ((5, 2), {"lookahead": 0, "skip_idle": False}),
    "nothing": ((5, 0), {"lookahead": 1, "idle": micro_batches([90])[0]}),
}


@play.right(CELLS, UNEVEN)
def streams_are_uneven(case):
    """Rank 1 runs out of data early, or has none; windows overshoot, and the gradient is clipped."""
    counts, options = UNEVEN[case.variant]
    watched = Watched(case.cell, 7, clip=0.4)
    run(watched, iter(micro_batches(range(counts[watched.rank]))), **options)
    noted(watched, counts)
    return watched.found([watched.engine.global_samples], [2 * sum(counts)])


LEFT = {
    f"{name}-ahead-{ahead}": (error, ahead)
    for name, error in (("break", None), ("interrupt", KeyboardInterrupt), ("error", ValueError))
    for ahead in (0, 3)
}


@play.right([Cell(0), Cell(2), Cell(3)], LEFT)
def a_loop_is_left_inside_a_window(case):
    """By break, Ctrl-C or an error, behind the third pass; a new passes() goes on with what the stream still has."""
    error, ahead = LEFT[case.variant]
    watched, stream, seen = Watched(case.cell), iter(micro_batches(range(8))), []
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        for batch in watched.engine.passes(stream, lookahead=ahead):
            watched.engine.backward(watched.loss(index_of(batch)))
            watched.engine.step()
            seen.append(index_of(batch))
            if len(seen) == 3 and error is None:
                break
            if len(seen) == 3:
                raise error
    seen += run(watched, stream, lookahead=ahead)
    for index in seen:
        watched.noted(index)
    return watched.found([seen[:4], from_all(seen)[0]], [[0, 1, 2, 3 if not ahead else seen[3]], from_all(seen)[1]])


@play.right([Cell(0), Cell(2), Cell(3)])
def a_thread_runs_the_loop(case):
    """All of it, passes() included."""
    watched = Watched(case.cell)
    thread = threading.Thread(target=run, args=(watched, micro_batches(range(4))), kwargs={"lookahead": 1})
    thread.start()
    thread.join()
    noted(watched, (4, 4))
    return watched.found()


def endless():
    """Micro-batches without an end, the same eight again and again."""
    index = 0
    while True:
        yield micro_batches([index % 8])[0]
        index += 1


@play.right([Cell(0), Cell(2), Cell(3)], ["thread", "signal"])
def rank_1_stops_at_any_moment(case):
    """From another thread or from a handler of a signal: all ranks end between the same two windows."""
    watched = Watched(case.cell)
    before = signal.signal(signal.SIGUSR1, lambda *_: watched.engine.stop())
    stop = watched.engine.stop if case.variant == "thread" else lambda: os.kill(os.getpid(), signal.SIGUSR1)
    if watched.rank == 1:
        threading.Timer(0.4, stop).start()
    seen = run(watched, endless(), lookahead=3)
    signal.signal(signal.SIGUSR1, before)
    for index in seen:
        watched.noted(index)
    passes = from_all(len(seen))
    return watched.found([watched.engine.stopping, watched.engine.window.passes, passes[0]], [True, 0, passes[1]])


class Bigrams(nn.Module):
    """A language model that sees one token, so that packed sequences can't see each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids, position_ids=None):
        return self.out(torch.tanh(self.rows(input_ids)))


def rollouts(count):
    """Two of each prompt, of 3 to 11 tokens; the reward is the number."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, size=1):
        return torch.randint(low, high, (size,), generator=generator).tolist()

    for number in range(count):
        (length,) = draw(3, 12)
        (prompt,) = draw(1, length)
        advantage = float(torch.randn(1, generator=generator))
        tokens = tuple(draw(0, 16, length))
        yield ds_parity.Rollout(f"p{number // 2}", tokens, prompt, advantage=advantage, reward=float(number))


def mean_loss(policy, rollout):
    """The policy gradient's loss, averaged over the loss tokens, written out once more."""
    tokens = torch.tensor(rollout.tokens)
    taken = torch.log_softmax(policy(tokens[:-1]), -1).gather(-1, tokens[1:, None]).squeeze(-1)
    return -rollout.advantage * taken[rollout.prompt_length - 1 :].mean()


PLANS = {
    f"{weight}-{layout}-{count}": (weight, layout, count, target)
    for weight in ("rollout", "token", "pass", "target")
    for layout in ("packed", "padded")
    for count, target in (("rollout", 8), ("prompt", 4))
}


@play.right([Cell(0), Cell(3)], PLANS)
def a_plan_is_trained(case):
    """33 rollouts in micro-batches of 24 tokens, with the bundled loss and a metric of every rollout."""
    weight, layout, count, target = PLANS[case.variant]
    held = list(rollouts(33))
    model = PolicyGradient(Bigrams(), loss_weight=weight)
    watched = Watched(case.cell, target, model=model, section={"loss_weight": weight, "count": count})
    plan = ds_parity.plan(held, dp_world_size=2, target=target, max_tokens=24, count=count, layout=layout)
    for batch in watched.engine.passes(ds_parity.micro_batches(plan, watched.rank), lookahead=2):
        watched.engine.record("reward", torch.tensor([one.reward for one in batch.held]))
        watched.engine.backward(watched.engine(**batch.inputs))
        watched.engine.step()
    for window in plan.windows:
        _planned(watched.oracle, window, held, weight)
    rewards = [held[number].reward for number in plan.windows[-1].rollouts]
    return watched.found([watched.engine.last_step.metrics["reward"]], [sum(rewards) / len(rewards)])


def _planned(oracle, window, held, weight):
    if weight == "pass":
        rows = [window.micro_batch(number, rank) for number in range(window.passes) for rank in range(2)]
    else:
        rows = [[number] for number in window.rollouts]
    for row in (one for one in rows if len(one)):
        own = [held[number] for number in row]
        units = own[0].loss_tokens if weight == "token" else 1
        oracle.add(units, lambda model, own=own: sum(mean_loss(model.policy, one) for one in own) / len(own))
    oracle.end_pass(0, rollouts=len(window.rollouts))
    oracle.step()


@play.refused(
    [Cell(0), Cell(2), Cell(3)],
    {"ahead-0": ("RankDesyncError", "OwnError"), "ahead-2": ("RankDesyncError", "OwnError")},
)
def a_stream_breaks_on_one_rank(case):
    """The rank's own error goes through; the other is told of it."""
    watched = Watched(case.cell)

    def stream():
        yield from micro_batches(range(3))
        if watched.rank:
            raise OwnError("the disk is gone")
        yield from micro_batches(range(3, 6))

    run(watched, stream(), lookahead=int(case.variant[-1]))


@play.right([Cell(0), Cell(1), Cell(2)], ["as-far", "a-loop"])
def one_rank_knows_whole_windows(case):
    """The other looks as far ahead, or reads no stream: each would divide by another total. No step is taken."""
    watched = Watched(case.cell, 2 if case.variant == "a-loop" else 8)
    ahead = "window" if watched.rank else 4
    reads_no_stream = case.variant == "a-loop" and watched.rank == 0
    with pytest.raises(ds_parity.RankDesyncError):
        watched.passes(range(8)) if reads_no_stream else run(watched, micro_batches(range(8)), lookahead=ahead)
    return Found(0.0, [watched.engine.global_steps], [0])


class OwnError(ds_parity.DsParityError):
    """An error of the user's, told apart from all others."""


@play.right([Cell(0), Cell(3)])
def a_step_was_taken_by_both(case):
    """Weights of both ranks are the same behind uneven windows, bit for bit."""
    watched = Watched(case.cell, 7)
    run(watched, micro_batches(range((5, 2)[watched.rank])))
    own = {name: value.tolist() for name, value in weights_of(watched.engine).items()}
    other = from_all(own)[1 - watched.rank]
    tensors = [{name: torch.tensor(value) for name, value in one.items()} for one in (own, other)]
    return Found(0.0, [distance(*tensors) == 0.0], [True])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_a_rank_whose_stream_breaks_takes_the_others_along(outcomes, case):
    outcomes.assert_refused(case)
