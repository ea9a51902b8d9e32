"""A second oracle: a window is one loss in fp64 over all its micro-batches, and its scenario says where it ends."""

import copy

import torch
import torch.distributed as dist

from tests.hard.unforeseen.cells import Found, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import Net, descent, sample


class Beside:
    """An engine, and plain torch over whole windows.

    Attributes:
        engine: the engine under test.
        model: the oracle's copy, in fp64.
        optimizer: the oracle's.
        window: the (weight, rank, index) of every micro-batch since the last step, of `size` samples each.
        losses: of the steps.
        norms: of their gradients, before clipping.
        clip: the greatest norm of a gradient; 0: any.
    """

    def __init__(self, cell, target=8, *, model=None, right=None, by=descent, clip=0.0, given=None, **options):
        """Build both.

        Args:
            cell: where the state lies.
            target: rollouts of a window.
            model: by default a Net.
            right: the oracle's model, if it is another.
            by: makes the oracle's optimizer.
            clip: the greatest norm of a gradient.
            given: keywords of `ds_parity.initialize`.
            options: of `config`.
        """
        model = Net() if model is None else model
        self.model = copy.deepcopy(model if right is None else right).double().cpu()
        self.optimizer, self.clip = by(self.model), clip
        self.window, self.losses, self.norms = [], [], []
        self.engine = engine_of(config(cell, target, clip=clip, **options), model, **(given or {}))
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def inputs(self, index, size=2):
        """What this rank has in a pass."""
        return [one.to(self.engine.device) for one in sample(self.rank, index, size)]

    def loss(self, index, size=2):
        """The engine's loss of it."""
        return self.engine(*self.inputs(index, size))

    def has(self, index, *weights, size=2):
        """Put a pass of all ranks into the oracle's window: what its micro-batch weighs on each; by default 2."""
        weights = weights or (2,) * self.ranks
        self.window += [(weight, rank, index, size) for rank, weight in enumerate(weights) if weight]

    def steps(self):
        """Take the oracle's step of its window."""
        total = sum(weight for weight, *_ in self.window)
        loss = 0.0
        for weight, rank, index, size in self.window:
            x, y = (one.double() for one in sample(rank, index, size))
            loss = loss + weight / total * self.model(x, y)
        self.optimizer.zero_grad()
        loss.backward()
        there = [one for group in self.optimizer.param_groups for one in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(there, self.clip or float("inf"))
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.norms.append(float(norm))
        self.window = []

    def passes(self, indices, size=2):
        """Run passes as a usual loop does, and have the oracle step where the engine has."""
        for index in indices:
            self.engine.backward(self.loss(index, size), rollouts=size)
            self.engine.step()
            self.has(index, *((size,) * self.ranks), size=size)
            if len(self.window) * size >= self.engine.window.target:
                self.steps()

    def right(self):
        """The oracle's weights, by name."""
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}

    def apart(self):
        """The greatest distance of a weight from the oracle's."""
        return distance(weights_of(self.engine), self.right())

    def found(self, got=(), right=(), *, steps=None):
        """Settle both, and return what was found; beside `got`, the last loss and the number of steps."""
        self.engine.finish()
        if self.window:
            self.steps()
        last = self.engine.last_step
        return Found(
            self.apart(),
            [*got, last.loss, self.engine.global_steps],
            [*right, self.losses[-1], len(self.losses) if steps is None else steps],
        )
