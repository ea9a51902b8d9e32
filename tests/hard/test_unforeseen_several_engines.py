"""Several engines in one process, as in PPO: each takes the steps of an fp64 oracle of its own."""

import functools

import deepspeed
import pytest
import torch

import ds_parity
from tests.hard.unforeseen.cells import Cell, Found, Watched, distance, weights_of
from tests.hard.unforeseen.oracle import RATE, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
# The first word of a variant is where the critic's state lies: a stage, and "o" for one that is offloaded.
CRITICS = ("0", "1", "2", "3", "2o", "3o")
ACTORS = (Cell(0), Cell(1), Cell(2), Cell(3), Cell(3, offload=True))
BY_CALLER = {"boundary": "caller"}


def critic_cell(case):
    """Where the critic's state lies in a case."""
    return Cell(int(case.variant[0]), offload=case.variant[1:2] == "o")


def reference_model(seed=7):
    """A model without an optimizer, partitioned by DeepSpeed's ZeRO 3."""
    return deepspeed.initialize(
        model=Net(seed), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )[0]


class ByCaller(Watched):
    """An engine whose caller ends windows, beside its oracle."""

    def __init__(self, cell, **options):
        super().__init__(cell, 10**9, section={**BY_CALLER, **options.pop("section", {})}, **options)

    def step(self):
        """End the window of both."""
        self.engine.step()
        self.oracle.step()


def both_found(*watched):
    """What was found of engines, together."""
    found = [one.found() for one in watched]
    got, right = ([value for one in found for value in getattr(one, which)] for which in ("got", "right"))
    return Found(max(one.apart for one in found), got, right)


def scored(reference, inputs):
    """What the reference model says, and what its own model says in one piece: the greatest distance."""
    reference.eval()
    with torch.no_grad():
        said = reference(*inputs)
    right = Net(7)(*(one.cpu() for one in inputs))
    return abs(float(said) - float(right.detach()))


@play.right(ACTORS, CRITICS)
def actor_and_critic_have_windows_of_their_own(case):
    """The actor steps by 8 rollouts, the critic by 12 and clipped; for each pass of the one the other has 0 to 2.

    Ranks bring uneven rollouts, and a reference model on ZeRO 3 is asked between forward, backward and step.
    """
    actor = Watched(case.cell, 8)
    critic = Watched(critic_cell(case), 12, model=Net(seed=1), clip=0.5, section={"loss_weight": "rollout"})
    reference, off, critics = reference_model(), 0.0, iter(range(100, 200))
    for index in range(9):
        sizes = [1 + (rank + index) % 3 for rank in range(actor.ranks)]
        own = sizes[actor.rank]
        loss = actor.loss(index, own)
        off = max(off, scored(reference, actor.inputs(index, own)))
        for number in [next(critics) for _ in range(index % 3)]:
            critic.engine.backward(critic.loss(number), rollouts=2)
            off = max(off, scored(reference, critic.inputs(number)))
            critic.engine.step()
            critic.noted(number)
        actor.engine.backward(loss, rollouts=own)
        off = max(off, scored(reference, actor.inputs(index, own)))
        actor.engine.step()
        actor.noted(index, *sizes)
    found = both_found(actor, critic)
    return Found(max(found.apart, off), found.got, found.right)


@play.right([Cell(0), Cell(1), Cell(2), Cell(3)], ["0", "1", "2", "3", "0-uneven", "1-uneven", "1-announced"])
def the_critic_is_stepped_by_its_caller(case):
    """Its windows begin and end inside those of the actor, which reads streams: rank 1 runs out of data."""
    actor, critic = Watched(case.cell, 8), ByCaller(critic_cell(case), model=Net(seed=1))
    counts, numbers = (9, 5), iter(range(100, 200))
    stream = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(counts[actor.rank])]
    # Whoever steps by itself meets the others in its first window: before the actor, on every rank.
    handed = 0
    for batch in actor.engine.passes(stream, skip_idle=False):
        number, handed = next(numbers), handed + 1
        uneven = "uneven" in case.variant and handed % 2 == 0 and handed > 2
        if "announced" in case.variant:
            critic.engine.set_gradient_accumulation_boundary(handed % 3 == 0)
        if not (uneven and critic.rank):
            critic.engine.backward(critic.loss(number), rollouts=2)
        critic.noted(number, 2, 0 if uneven else 2)
        loss = actor.loss(batch.inputs["index"])
        if handed % 3 == 0:
            critic.step()
        actor.engine.backward(loss)
        actor.engine.step()
    for index in range(9):
        actor.noted(index, *(2 if index < count else 0 for count in counts))
    actor.engine.finish()
    critic.engine.finish()
    actor.oracle.finish()
    critic.oracle.finish()
    steps = [one.engine.global_steps for one in (actor, critic)]
    right = [len(one.oracle.losses) for one in (actor, critic)]
    return Found(max(actor.apart(), critic.apart()), [*steps, handed], [*right, 9])


@play.right([Cell(1), Cell(2), Cell(3)], ["0", "2", "3"])
def one_stream_runs_inside_the_other(case):
    """For each pass of the actor the critic reads a whole stream with look-ahead, which ends inside its window."""
    actor = Watched(case.cell, 8, section={"lookahead": 2})
    critic = Watched(critic_cell(case), 12, model=Net(seed=1))
    counts, first = (6, 4), 100
    streams = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(counts[actor.rank])]
    for batch in actor.engine.passes(streams, skip_idle=False):
        own = [ds_parity.MicroBatch({"index": first + number}, rollouts=2) for number in range(2 + actor.rank)]
        for inner in critic.engine.passes(own, lookahead=3, finish=False, skip_idle=False):
            critic.engine.backward(critic.loss(inner.inputs["index"]))
            critic.engine.step()
        for number in range(3):
            critic.noted(first + number, 0 if number == 2 else 2, 2)
        first += 3
        actor.engine.backward(actor.loss(batch.inputs["index"]))
        actor.engine.step()
    for index in range(6):
        actor.noted(index, *(2 if index < count else 0 for count in counts))
    return both_found(actor, critic)


@play.right([Cell(0), Cell(2), Cell(3)], ["0", "2", "3"])
def one_is_saved_and_goes_back_while_the_other_is_inside_a_window(case):
    """The actor's checkpoint, loaded again later, leaves the critic and its open window alone."""
    actor, critic = Watched(case.cell, 8), Watched(critic_cell(case), 12, model=Net(seed=1))
    actor.passes(range(2))
    critic.passes(range(100, 102))
    before = actor.oracle_weights()
    actor.engine.save_checkpoint(f"{case.folder}/actor")
    actor.engine.backward(actor.loss(50), rollouts=2)
    actor.engine.step()
    critic.passes([102])
    actor.engine.load_checkpoint(f"{case.folder}/actor")
    critic.passes(range(103, 108))
    off = distance(weights_of(actor.engine), before)
    actor.passes(range(2, 6))
    found = both_found(actor, critic)
    return Found(max(off, found.apart), found.got, found.right)


@play.right([Cell(0), Cell(1), Cell(2), Cell(3)], ["0", "2", "3"])
def one_is_destroyed_inside_a_window(case):
    """The other one goes on, and so does one that is built after it."""
    actor, critic = Watched(case.cell, 8), Watched(critic_cell(case), 12, model=Net(seed=1))
    actor.passes(range(3))
    critic.passes(range(100, 102))
    actor.engine.destroy()
    critic.passes(range(102, 105))
    again = Watched(case.cell, 8, model=Net(seed=2))
    for index in range(5):
        again.passes([index])
        critic.passes([105 + index])
    return both_found(critic, again)


HALF = {
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp32-sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


@play.right([Cell(1), Cell(2), Cell(3)], HALF)
def precisions_differ(case):
    """An actor in half precision beside a critic in fp32: the critic is the oracle's, and the actor as it is alone."""

    def trained(beside=None):
        actor = Watched(case.cell, 8, clip=0.5, **HALF[case.variant])
        for index in range(8):
            x, y = actor.inputs(index)
            kind = next(actor.engine.module.parameters()).dtype
            loss = actor.engine(x.to(kind), y.to(kind))
            if beside is not None:
                beside(index)
            actor.engine.backward(loss.float(), rollouts=2)
            actor.engine.step()
        return weights_of(actor.engine)

    alone = trained()
    critic = Watched(case.cell, 12, model=Net(seed=1), clip=0.5)
    together = trained(lambda index: critic.passes([100 + index]))
    found = critic.found([distance(together, alone)], [0.0])
    return Found(found.apart, found.got, found.right)


class WithLate(Net):
    """Has a layer that is used where a forward is told to."""

    def __init__(self):
        super().__init__()
        self.late = torch.nn.Linear(8, 1)

    def forward(self, x, y, late=False):
        hidden = torch.tanh(self.body(x))
        predicted = self.head(hidden) + (self.late(hidden) if late else 0.0)
        return (predicted.squeeze(-1) - y).pow(2).mean()


def adamw(model):
    """The optimizer of the oracle, which steps what has no gradient by zeros."""
    return torch.optim.AdamW(model.parameters(), lr=RATE / 10, weight_decay=0.1, eps=1e-3)


@play.right([*ACTORS, Cell(1, offload=True)], bound=3e-6)
def the_first_gradient_comes_in_the_third_window(case):
    """AdamW steps the layer by zeros before: its weight decay and its count of steps begin with the first window."""
    model = WithLate()
    watched = Watched(case.cell, model=model, by=adamw, optimizer=False, given={"optimizer": adamw(model)})
    for index in range(10):
        late = index >= 4
        watched.engine.backward(watched.loss(index, 2, late), rollouts=2)
        watched.engine.step()
        watched.noted(index, more=(late,))
    return watched.found()


@play.refused([Cell(2), Cell(3)], "WindowError: one backward() brought the gradient of a parameter twice")
def a_block_is_reached_twice_by_reentry(case):
    """Both gradients lie in one bucket on ZeRO 3; ZeRO 2 takes none twice."""
    _reached_twice(case, {})


@play.right([Cell(0), Cell(1), Cell(3), Cell(3, offload=True)], ["one", "two"])
def a_block_is_reached_twice_through_small_buckets(case):
    """By two uses in one forward, or by two forwards for one backward, with idle passes between."""
    return _reached_twice(case, {"reduce_bucket_size": 20}, forwards=1 + (case.variant == "two"))


class Reentrant(Net):
    """Each forward runs its body in a block of reentrant checkpointing, the first layer twice."""

    reentrant = True

    def __init__(self):
        super().__init__()
        self.square = torch.nn.Linear(6, 6)
        self.between = torch.nn.Linear(6, 6)

    def predicted(self, x):
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=self.reentrant)
        x = x.clone().requires_grad_()
        once = run(self.between, run(self.square, x))
        return super().predicted(torch.tanh(run(self.square, once)))


class Right(Reentrant):
    """The same without a backward inside the backward."""

    reentrant = False


def _reached_twice(case, zero, forwards=1):
    watched = Watched(case.cell, 12, model=Reentrant(), right=Right(), zero=zero)

    def loss(model, x, y):
        return sum((model(x * factor, y) for factor in (1.0, 0.5)[:forwards]), 0.0)

    for index in range(9):
        idle = index in (3, 5)
        own = loss(watched.engine, *watched.inputs(index))
        if idle and watched.rank == 1:
            watched.engine.idle(own)
        else:
            watched.engine.backward(own, rollouts=2)
        watched.engine.step()
        for rank in range(2 - idle):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(2, lambda model, x=x, y=y: loss(model, x, y))
        watched.oracle.end_pass(4 - 2 * idle)
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_engine_steps_as_its_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
