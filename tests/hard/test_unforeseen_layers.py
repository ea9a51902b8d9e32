"""Policies of layers that nobody planned for: shared and used again, made from other weights, of other kinds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.hard.unforeseen.cells import CELLS, Found, config, engine_of
from tests.hard.unforeseen.language import TOKENS, WIDTH, Policy, Process, by_rollout, clipped, rollout
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
CLIP, RATE = 2.0, 0.1  # most policies have steps that are clipped, and steps that are not


def run_twice(policy):
    """As a universal transformer does."""
    policy.blocks = nn.ModuleList([*policy.blocks, *policy.blocks])


def recomputed_twice(policy):
    """The same, run once more in the backward."""
    run_twice(policy)
    policy.recomputes = "plain"


def shared_crosswise(policy):
    """A matrix and a bias of one block are those of the other."""
    one, other = policy.blocks
    other.up.weight, other.norm.bias = one.up.weight, one.norm.bias


def head_of_the_embedding(policy):
    """Of one weight, with a block that runs twice."""
    policy.head.weight = policy.embedding.weight
    run_twice(policy)


class Transposed(nn.Module):
    """Reads the weight of a module that is not its own."""

    def __init__(self, embedding):
        super().__init__()
        self._of = [embedding]

    def forward(self, x):
        """Return the product with the transposed weight."""
        return x @ self._of[0].weight.t()


def head_that_reads_another(policy):
    """A product with the embedding's weight, which belongs to another module."""
    policy.head = Transposed(policy.embedding)
    policy.head.weight = policy.embedding.weight


def normalized_weights(policy):
    """Directions and lengths."""
    for block in policy.blocks:
        parametrizations.weight_norm(block.up)
        parametrizations.weight_norm(block.query)


def orthogonal(policy):
    """A weight that is solved for."""
    parametrizations.orthogonal(policy.blocks[0].value, orthogonal_map="cayley")


class Scaled(nn.Module):
    """Half of a weight, and a bit."""

    def forward(self, x):
        """Return it."""
        return 0.5 * x + 0.1


def made_from_another(policy):
    """By a rule of the user's."""
    parametrize.register_parametrization(policy.head, "weight", Scaled())


class Instead(nn.Module):
    """A layer of another kind in a block's place.

    Args:
        layer: which one.
        run: `(layer, x, visible)` gives what the block gives.
    """

    def __init__(self, layer, run):
        super().__init__()
        self.layer, self._run = layer, run

    def forward(self, x, visible):
        """Return x, and what the layer makes of it."""
        return x + self._run(self.layer, x, visible)


def _sequence(layer, x, visible):
    return layer(x[None])[0][0]


def _attending(layer, x, visible):
    return layer(x[None], src_mask=~visible)[0]


def _grouped(layer, x, visible):
    return layer(x.t()[None])[0].t()


def _bagged(layer, x, visible):
    bags = torch.arange(len(x), device=x.device)[:, None] % TOKENS
    return layer(bags.expand(-1, 3).contiguous())


def _called(layer, x, visible):
    return torch.func.functional_call(layer, {"weight": 2 * layer.weight}, (x,))


def _penalized(layer, x, visible):
    return layer(x) + 0.01 * sum(one.pow(2).sum() for one in layer.parameters())


def _recomputed_inside(layer, x, visible):
    return checkpoint(lambda y: checkpoint(layer, torch.tanh(y), use_reentrant=False), x, use_reentrant=False)


def _encoder():
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


KINDS = {
    "GRU": (lambda: nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True), _sequence),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), _sequence),
    "encoder": (_encoder, _attending),
    "convolution": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2), _grouped),
    "group norm": (lambda: nn.GroupNorm(4, WIDTH), _grouped),
    "bag": (lambda: nn.EmbeddingBag(TOKENS, WIDTH, mode="mean"), _bagged),
    "functional call": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), _called),
    "penalty": (lambda: nn.Linear(WIDTH, WIDTH), _penalized),
    "recomputed inside": (lambda: nn.Linear(WIDTH, WIDTH), _recomputed_inside),
}
CHANGES = (
    run_twice,
    recomputed_twice,
    shared_crosswise,
    head_of_the_embedding,
    head_that_reads_another,
    normalized_weights,
    orthogonal,
    made_from_another,
)


def _mean(model, rollouts):
    return torch.stack([one.mean() for one in clipped(by_rollout(model(rollouts), rollouts), rollouts)]).mean()


def _trained(case, policy):
    """Three windows of 8 rollouts, whose gradients are clipped."""
    right = Process(policy, lambda own: torch.optim.SGD(own.parameters(), lr=RATE), CLIP)
    engine = engine_of(config(case.cell, 8, clip=CLIP, section={"overshoot": "reset"}), policy)
    engine.optimizer.param_groups[0]["lr"] = RATE
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for window in range(3):
        micro_batches = []
        for index, size in ((2 * window, 1), (2 * window + 1, 2)):
            of_ranks = [[rollout(one, index, number) for number in range(size + one)] for one in range(ranks)]
            micro_batches += of_ranks
            engine.backward(_mean(engine, of_ranks[rank]), rollouts=len(of_ranks[rank]))
            engine.step()
        count = sum(map(len, micro_batches))
        right.step(sum(len(own) * _mean(right.model, own) for own in micro_batches) / count)
    last = engine.last_step
    return Found(right.apart(engine), [engine.global_steps, last.loss, last.rollouts], [3, right.losses[-1], 8])


@play.right(CELLS, [one.__name__ for one in CHANGES], bound=1e-5)
def weights_are_shared_or_made(case):
    """By what a module does with its parameters."""
    policy = Policy()
    next(one for one in CHANGES if one.__name__ == case.variant)(policy)
    return _trained(case, policy)


# ZeRO 3 of DeepSpeed has a module's weights in its own forward alone, and as parameters alone.
NOT_ON_ZERO3 = ("functional call", "penalty")


@play.right(CELLS, [one for one in KINDS if one not in NOT_ON_ZERO3], bound=1e-5)
@play.right([one for one in CELLS if one.stage < 3], NOT_ON_ZERO3, bound=1e-5)
def a_block_is_of_another_kind(case):
    """In the second one's place."""
    policy = Policy()
    make, run = KINDS[case.variant]
    policy.blocks[1] = Instead(make(), run)
    return _trained(case, policy)


HOOKS = {
    "outputs": lambda block: block.register_forward_hook(lambda module, x, y: 1.5 * y),
    "inputs": lambda block: block.up.register_forward_pre_hook(lambda module, x: (2 * x[0],)),
    "gradients of outputs": lambda block: block.up.register_full_backward_pre_hook(lambda module, g: (0.5 * g[0],)),
    "gradients of inputs": lambda block: block.down.register_full_backward_hook(
        lambda module, inputs, outputs: (0.5 * inputs[0],)
    ),
}


@play.right(CELLS, [f"{when} {hook}" for hook in HOOKS for when in ("before", "behind")], bound=1e-5)
def modules_have_hooks(case):
    """Which change what passes through, registered before the engine is built or behind that."""
    when, _, kind = case.variant.partition(" ")
    policy = Policy()
    if when == "before":
        for block in policy.blocks:
            HOOKS[kind](block)
        return _trained(case, policy)
    return _trained(case, Late(policy, HOOKS[kind]))


class Late(nn.Module):
    """Registers hooks in its first forward.

    Args:
        policy: whose blocks get them.
        hook: registers one at a block.
    """

    def __init__(self, policy, hook):
        super().__init__()
        self.policy, self._hook, self._has = policy, hook, False

    def forward(self, rollouts):
        """Return what the policy says."""
        if not self._has:
            self._has = True
            for block in self.policy.blocks:
                self._hook(block)
        return self.policy(rollouts)


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_one_process_does(outcomes, case):
    outcomes.assert_right(case)
