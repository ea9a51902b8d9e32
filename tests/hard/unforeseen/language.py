"""A small language model, its rollouts, and its windows in plain fp64 torch: each window is one loss of one process."""

import copy

import deepspeed
import torch
from torch import nn

from tests.hard.unforeseen.cells import distance

TOKENS, WIDTH = 24, 16


class Block(nn.Module):
    """Attention and a layer behind it."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, visible):
        scores = (self.query(x) @ self.key(x).transpose(-1, -2) / WIDTH**0.5).masked_fill(~visible, float("-inf"))
        x = x + torch.softmax(scores, -1) @ self.value(x)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Policy(nn.Module):
    """Log-probabilities of the next tokens of packed rollouts; with `valued` a row of values beside them.

    Attributes:
        recomputes: "" for nothing; else how blocks are run in the backward once more, "plain" or "reentrant".
    """

    def __init__(self, recomputes="", valued=False):
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.embedding, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.valued = nn.Linear(WIDTH, TOKENS), nn.Linear(WIDTH, 1) if valued else None

    def forward(self, rollouts):
        device = self.head.weight.device
        packed = torch.cat([one["ids"] for one in rollouts]).to(device)
        lengths = [len(one["ids"]) for one in rollouts]
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        segments = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)]).to(device)
        visible = (segments[:, None] == segments) & (torch.arange(len(packed))[:, None] >= torch.arange(len(packed)))
        hidden = self.embedding(packed) + self.position(positions)
        for block in self.blocks:
            hidden = self._run(block, hidden, visible.to(device))
        # One tensor, whatever there are of rollouts: on ZeRO 3 ranks must return equally many.
        rated = torch.log_softmax(self.head(hidden), -1).gather(-1, packed.roll(-1)[:, None]).squeeze(-1)
        return rated if self.valued is None else torch.stack([rated, self.valued(hidden).squeeze(-1).roll(-1)])

    def _run(self, block, hidden, visible):
        if not (self.recomputes and torch.is_grad_enabled()):
            return block(hidden, visible)
        hidden = hidden if hidden.requires_grad else hidden.requires_grad_()
        reenters = self.recomputes == "reentrant"
        return torch.utils.checkpoint.checkpoint(block, hidden, visible, use_reentrant=reenters)


def by_rollout(tokens, rollouts):
    """What a forward says of packed tokens, cut into those of each rollout behind its prompt."""
    return [one[:-1] for one in tokens.split([len(one["ids"]) for one in rollouts])]


def rollout(rank, index, number):
    """One of 4 to 9 tokens, whose first is the prompt: its ids, advantage and return."""
    generator = torch.Generator().manual_seed(7919 * rank + 101 * index + number)
    length = int(torch.randint(4, 10, (1,), generator=generator))
    advantage, returned = torch.randn(2, generator=generator).tolist()
    ids = torch.randint(0, TOKENS, (length,), generator=generator)
    return {"ids": ids, "advantage": advantage, "return": returned, "tokens": length - 1, "old": None}


def clipped(said, rollouts):
    """What PPO makes of each token: its ratio to the old policy, clipped, times the advantage."""
    losses = []
    for one, new in zip(rollouts, said, strict=True):
        ratio = torch.exp(new - (new.detach() if one["old"] is None else one["old"].to(new)))
        losses.append(-torch.minimum(ratio * one["advantage"], ratio.clamp(0.9, 1.1) * one["advantage"]))
    return losses


class Process:
    """One process that takes the steps of whole windows.

    Attributes:
        model: a copy in fp64.
        losses: of each step.
    """

    def __init__(self, model, optimizer, clip):
        self.model = copy.deepcopy(model).double().cpu()
        self._optimizer, self._clip, self.losses = optimizer(self.model), clip, []

    def step(self, loss):
        """Take the step of a window's loss."""
        self._optimizer.zero_grad()
        loss.backward()
        trained = [one for one in self.model.parameters() if one.requires_grad]
        for one in trained:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        if self._clip:
            torch.nn.utils.clip_grad_norm_(trained, self._clip)
        self._optimizer.step()
        self.losses.append(float(loss.detach()))

    def apart(self, engine):
        """The greatest distance of a weight of an engine."""
        there = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(there.values())):
            weights = {name: one.detach().double().cpu().clone() for name, one in there.items()}
        return distance(weights, {name: one.detach() for name, one in self.model.named_parameters()})
