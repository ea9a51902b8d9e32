"""Models of kinds that nobody planned for: shared bodies, adapters, unused branches, sparse rows, hooks."""

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Found, Watched, distance, weights_of
from tests.hard.unforeseen.oracle import RATE, WIDTH, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


class Heads(Net):
    """An actor's and a critic's head over one body."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(8, 1)

    def forward(self, x, y, of="head"):
        return (getattr(self, of)(torch.tanh(self.body(x))).squeeze(-1) - y).pow(2).mean()


@play.right(CELLS, ["sum", "in-turn"])
def actor_and_critic_share_a_body(case):
    """Both losses in one backward, or a backward each."""
    watched = Watched(case.cell, model=Heads())

    def loss(model, x, y, index):
        if case.variant == "sum":
            return model(x, y) + 0.5 * model(x, y, "value")
        return model(x, y, ("head", "value")[index % 2])

    for index in range(8):
        watched.engine.backward(loss(watched.engine, *watched.inputs(index), index), rollouts=2)
        watched.engine.step()
        for rank in range(watched.ranks):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(2, lambda model, x=x, y=y, index=index: loss(model, x, y, index))
        watched.oracle.end_pass(4)
    return watched.found()


class Adapted(Net):
    """Two low-rank adapters over a frozen base."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for name in ("one", "two"):
            self.register_parameter(f"{name}_in", nn.Parameter(0.3 * torch.randn(2, WIDTH)))
            self.register_parameter(f"{name}_out", nn.Parameter(0.3 * torch.randn(8, 2)))

    def adapter(self, name):
        """The parameters of one adapter."""
        return [getattr(self, f"{name}_in"), getattr(self, f"{name}_out")]

    def forward(self, x, y, name="one"):
        inside, outside = self.adapter(name)
        hidden = torch.tanh(self.body(x) + x @ inside.t() @ outside.t())
        return (self.head(hidden).squeeze(-1) - y).pow(2).mean()


@play.right([Cell(1), Cell(2)])
@play.refused([Cell(0)], "WindowError: gradients were changed outside of engine.backward()")
def two_engines_train_adapters_of_one_base(case):
    """Windows of two and of three passes, interleaved. DeepSpeed's ZeRO 0 reduces the other engine's gradients, too."""
    model, both = Adapted(), []
    for name, target in (("one", 8), ("two", 12)):
        right = Adapted()
        for one in right.adapter("two" if name == "one" else "one"):
            one.requires_grad_(False)
        given = {"model_parameters": model.adapter(name)}
        both.append((name, Watched(case.cell, target, model=model, right=right, given=given)))
    for index in range(6):
        for name, watched in both:
            watched.engine.backward(watched.loss(index, 2, name), rollouts=2)
            watched.engine.step()
            watched.noted(index, more=(name,))
    got = weights_of(both[0][1].engine)
    right = {
        key: one for name, watched in both for key, one in watched.oracle_weights().items() if key.startswith(name)
    }
    return Found(distance(got, right))


@play.right(
    [Cell(3), Cell(3, offload=True)], [f"{given}-ahead-{ahead}" for given in ("all", "own") for ahead in (0, 3)]
)
def an_adapter_is_born_partitioned(case):
    """Under zero.Init; the optimizer is given all parameters or the adapter's; rank 1 runs out of data."""
    with deepspeed.zero.Init(
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    ):
        model = Adapted()
    for one in model.adapter("two"):
        one.requires_grad_(False)
    right, own = Adapted(), model.adapter("one")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        right.load_state_dict({name: one.detach().clone() for name, one in model.named_parameters()})
    given = {"model_parameters": own if case.variant.startswith("own") else list(model.parameters())}
    watched, counts = Watched(case.cell, model=model, right=right, given=given), (9, 4)
    stream = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(counts[watched.rank])]
    for batch in watched.engine.passes(stream, lookahead=int(case.variant[-1])):
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    for index in range(9):
        watched.noted(index, *(2 if index < count else 0 for count in counts))
    return watched.found()


class Branched(Net):
    """Has a branch that a pass uses where it is told to."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(WIDTH, 8)

    def forward(self, x, y, use):
        hidden = self.body(x) + self.side(x) if use else self.body(x)
        return (self.head(torch.tanh(hidden)).squeeze(-1) - y).pow(2).mean()


USES = {
    "every-third": lambda index: index % 3 == 0,
    "never": lambda index: False,
    "late": lambda index: index in (3, 8, 12),
}


def _branched(case, counts):
    use, ahead = case.variant.rsplit("-", 1)
    watched = Watched(case.cell, model=Branched())
    stream = [
        ds_parity.MicroBatch({"index": index}, rollouts=1 + (index + watched.rank) % 2)
        for index in range(counts[watched.rank])
    ]
    for batch in watched.engine.passes(stream, lookahead=int(ahead)):
        index = batch.inputs["index"]
        loss = watched.loss(index, 1 + (index + watched.rank) % 2, USES[use](index))
        watched.engine.backward(loss)
        watched.engine.step()
    for index in range(max(counts)):
        sizes = (1 + (index + rank) % 2 if index < count else 0 for rank, count in enumerate(counts))
        watched.noted(index, *sizes, more=(USES[use](index),))
    return watched.found()


@play.right(CELLS, [f"{use}-{ahead}" for use in USES for ahead in (0, 4)])
def a_branch_is_used_in_some_passes_of_a_stream(case):
    """By all ranks alike."""
    return _branched(case, (14, 14))


@play.right([Cell(0)], [f"{use}-{ahead}" for use in USES for ahead in (0, 4)])
def a_branch_is_used_while_one_rank_has_run_out_of_data(case):
    """Rank 1 stands in with its last pass, which used the branch or did not, whatever the other rank's pass does."""
    return _branched(case, (14, 5))


class Gates(Net):
    """70 gates of the same size; a pass uses one of them."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ParameterList([nn.Parameter(torch.full((3,), 0.5)) for _ in range(70)])

    def forward(self, x, y, number):
        return (self.predicted(x) * self.gates[number].prod() - y).pow(2).mean()


@play.refused([Cell(1), Cell(2)], dict.fromkeys(("60", "61"), "RankDesyncError: ranks are not in the same place"))
def ranks_use_gates_far_apart(case):
    """61 is the exponent of the prime by which Python's hash of whole numbers goes: the two sets must still differ."""
    watched = Watched(case.cell, target=4, model=Gates())
    for index in range(2):
        watched.engine.backward(watched.loss(index, 1, 3 + watched.rank * int(case.variant)), rollouts=1)
        watched.engine.step()


class Rows(Net):
    """Looks rows up, by the signs of its inputs, in an embedding of sparse or dense gradients."""

    def __init__(self, sparse=True):
        super().__init__()
        self.rows = nn.Embedding(2**WIDTH, WIDTH, sparse=sparse)

    def predicted(self, x):
        numbers = sum((x[:, place] > 0).long() << place for place in range(WIDTH))
        return super().predicted(self.rows(numbers))


KINDS = ("finite", "real-NaN", "real-inf", "idle-NaN")


@play.right([Cell(0)], [f"{kind}-{clip}" for kind in KINDS for clip in ("0.0", "100.0", "0.05")])
def rows_have_sparse_gradients(case):
    """With clipping or without; a loss of the second window is not finite: no step where it is real, else no matter."""
    kind, clip = case.variant.rsplit("-", 1)
    watched = Watched(case.cell, model=Rows(), right=Rows(sparse=False), clip=float(clip))
    factor = {"real-NaN": float("nan"), "real-inf": float("inf"), "idle-NaN": float("nan")}.get(kind, 1.0)
    for index in range(8):
        bad = index == 2 and watched.rank == 1
        loss = watched.loss(index) * (factor if bad else 1.0)
        if bad and kind == "idle-NaN":
            watched.engine.idle(loss)
        else:
            watched.engine.backward(loss, rollouts=2)
        watched.engine.step()
        if not (kind.startswith("real") and index in (2, 3)):
            watched.noted(index, 2, 0 if index == 2 and kind == "idle-NaN" else 2)
    skipped = int(kind.startswith("real"))
    watched.engine.finish()
    watched.oracle.finish()
    steps = [watched.engine.global_steps, watched.engine.skipped_steps]
    return Found(watched.apart(), steps, [len(watched.oracle.losses) + skipped, skipped])


class Twice(Net):
    """Runs one checkpointed block twice, the one inside the other."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.square, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def block(self, x):
        """A layer that keeps the width."""
        return torch.tanh(self.norm(self.square(x)))

    def predicted(self, x):
        x = x.clone().requires_grad_()
        once = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return super().predicted(checkpoint(self.block, once, use_reentrant=self.reentrant))


class TwiceReentrant(Twice):
    """The same, with a backward inside the backward."""

    reentrant = True


@play.right(CELLS)
def a_block_is_checkpointed_twice(case):
    """With idle passes between, which run the same block."""
    return _with_idle_passes(Watched(case.cell, model=Twice()))


@play.right([Cell(0), Cell(1), Cell(1, offload=True)])
def a_block_is_checkpointed_twice_with_reentry(case):
    """Its weights get two gradients a pass, each from a backward of its own; DeepSpeed refuses it on ZeRO 2."""
    return _with_idle_passes(Watched(case.cell, model=TwiceReentrant(), right=Twice()))


def _with_idle_passes(watched, factor=1.0):
    for index in range(8):
        idle = index in (2, 5)
        if idle and watched.rank == 1:
            watched.engine.idle(factor * watched.loss(index))
        else:
            watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
        watched.noted(index, 2, 0 if idle else 2)
    return watched.found()


@play.right(CELLS)
def gradients_have_hooks_of_the_user(case):
    """One halves every gradient, one reads it; idle passes are NaN."""
    model, seen = Net(), []
    for one in model.parameters():
        one.register_hook(lambda gradient: 0.5 * gradient)
        one.register_post_accumulate_grad_hook(lambda one: seen.append(one.shape))

    def halved(right):
        return torch.optim.SGD(right.parameters(), lr=0.5 * RATE)

    watched = Watched(case.cell, model=model, right=Net(), by=halved)
    return _with_idle_passes(watched, factor=float("nan"))


@play.right(STAGES)
def the_engine_compiles_its_module(case):
    """By engine.compile(), whose backend runs what it has traced."""
    watched = Watched(case.cell)
    watched.engine.compile(backend="eager")
    watched.passes(range(8))
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
