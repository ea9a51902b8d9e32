"""Loops drawn at random: windows, terms, weights and what happens between passes; and what their steps should be.

A plan is drawn from a seed alike on every rank. The oracle computes each window as one graph in fp64 on one process,
over the micro-batches of all ranks, and shares nothing with ds_parity.
"""

import copy
import itertools
import random
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from tests.hard.unforeseen.oracle import WIDTH, sample

UNITS = ("rollout", "token", "pass", "target", "weight")
NAMES = ("policy", "kl", "router")


class Three(nn.Module):
    """A model whose forward gives three losses of each sample; the second does not use the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        hidden = torch.tanh(self.body(x))
        out = self.head(hidden).squeeze(-1)
        return (out - y).pow(2), hidden.pow(2).sum(-1), out.sin()


def momentum(model):
    """An optimizer of two groups with other rates and decays."""
    groups = [
        {"params": list(model.body.parameters()), "lr": 0.01, "weight_decay": 0.01},
        {"params": list(model.head.parameters()), "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its seed, its counts, its own weight, and the names of the terms that are given with 0."""

    seed: int = 0
    rollouts: int = 0
    tokens: int = 0
    weight: float = 0.0
    without: tuple = ()

    @property
    def active(self):
        """Whether it contains anything."""
        return bool(self.rollouts or self.tokens)


IDLE = Batch(seed=7)


@dataclass
class Plan:
    """What a loop does.

    Attributes:
        caller: the caller ends windows.
        terms: unit and coefficient by name.
        summed: losses are sums.
        target: rollouts of a window, nominal with `caller`.
        overshoot: what a surplus does.
        windows: by window and rank, the micro-batches, of which all ranks have as many, idle ones included, unless
            the caller ends windows on a stage that allows other numbers.
        ends_open: the last window is settled by finish().
        drop: and dropped there.
        events: by window, what happens behind its step.
    """

    caller: bool
    terms: dict
    summed: bool
    target: int
    overshoot: str
    windows: list = field(default_factory=list)
    ends_open: bool = False
    drop: bool = False
    clip: float = 0.0
    events: list = field(default_factory=list)

    @property
    def alike(self):
        """Whether one total corrects all terms."""
        units = {unit for unit, _ in self.terms.values()}
        return len(units) == 1 and not units & {"target", "weight"}


def drawn(seed, ranks, *, ragged):
    """Draw a plan; `ragged`: with `caller`, ranks may have other numbers of micro-batches in a window, also none."""
    chance = random.Random(seed)
    names = NAMES[: chance.choice((1, 2, 3, 3))]
    units = [chance.choice(UNITS) for _ in names]
    if chance.random() < 0.3:
        units = [chance.choice(("rollout", "token", "pass"))] * len(names)
    plan = Plan(
        caller=chance.random() < 0.5,
        terms={name: (unit, chance.choice((1.0, 0.25, -0.5, 3.0))) for name, unit in zip(names, units, strict=True)},
        summed=chance.random() < 0.4,
        target=chance.randint(3, 12),
        overshoot=chance.choice(("carry", "reset")),
        clip=chance.choice((0.0, 0.0, 0.5)),
    )
    seeds, carried = itertools.count(), 0
    for _ in range(chance.randint(3, 6)):
        plan.events.append(chance.choice(("", "", "rate", "save", "resume", "advantages", "evaluate", "empty")))
        window = _window(chance, plan, seeds, ranks, plan.target - carried, ragged=plan.caller and ragged)
        plan.windows.append(_complete(plan, window))
        if plan.overshoot == "carry" and not plan.caller:
            carried = (carried + _rollouts(window)) % plan.target
    if chance.random() < 0.4:
        _opened(plan, chance)
    return plan


def _window(chance, plan, seeds, ranks, needed, *, ragged):
    """Draw a window of so many rollouts at least, or, where its caller ends it, of a few passes."""
    window, length = [[] for _ in range(ranks)], chance.randint(1, 4)
    while True:
        idle = [chance.random() < 0.25 for _ in range(ranks)]
        if all(idle):
            idle[chance.randrange(ranks)] = False
        for rank, own in enumerate(window):
            if not (ragged and chance.random() < 0.3):
                own.append(IDLE if idle[rank] else _batch(chance, plan, next(seeds)))
        long_enough = max(map(len, window)) >= length and _rollouts(window) if plan.caller else False
        if long_enough or (not plan.caller and _rollouts(window) >= needed):
            return window


def _rollouts(window):
    return sum(one.rollouts for own in window for one in own)


def _batch(chance, plan, seed):
    rollouts, tokens = chance.randint(1, 3), chance.randint(1, 9)
    if plan.summed and chance.random() < 0.2:
        rollouts = 0  # a turn that is not its rollout's last
    without = ()
    if not plan.alike and len(plan.terms) > 1 and chance.random() < 0.25:
        without = (chance.choice(tuple(plan.terms)),)
    return Batch(seed, rollouts, tokens, chance.choice((0.5, 1.0, 2.25)), without)


def _opened(plan, chance):
    """Let the last window be one that finish() settles."""
    plan.ends_open, plan.drop = True, chance.random() < 0.4
    if not plan.caller:
        # Without its last pass it is short of its target.
        last = [batches[:-1] for batches in plan.windows[-1]]
        plan.windows[-1] = last = _complete(plan, last)
        if not _has_every_term(plan, last):
            plan.windows.pop()
            plan.ends_open = plan.drop = False


def _complete(plan, window):
    """Return the window with every term in it: a term of no micro-batch is refused, which is another test."""
    if _has_every_term(plan, window):
        return window
    return [[replace(one, without=()) for one in batches] for batches in window]


def _has_every_term(plan, window):
    weights = [weighs(plan, one) for batches in window for one in batches]
    return all(any(one[name] for one in weights) for name in plan.terms)


def weighs(plan, one):
    """What each term of a micro-batch weighs in its total."""
    units = {"rollout": one.rollouts, "token": one.tokens, "pass": int(one.active), "target": one.rollouts}
    units["weight"] = one.weight if one.active else 0.0
    return {name: 0.0 if name in one.without else float(units[unit]) for name, (unit, _) in plan.terms.items()}


class Steps:
    """The steps of a plan."""

    def __init__(self, model, plan):
        self.model = copy.deepcopy(model).double().cpu()
        self.optimizer = momentum(self.model)
        self.plan = plan
        self.losses, self.norms, self.means = [], [], []

    def take(self, window):
        """Take the step of a window: by rank its micro-batches."""
        totals, values = self._summed([(rank, one) for rank, own in enumerate(window) for one in own])
        step = 0.0
        for name, (unit, coefficient) in self.plan.terms.items():
            if totals[name]:  # a term of the unit weight may weigh nothing in a whole window
                step = step + coefficient * values[name] / (self.plan.target if unit == "target" else totals[name])
        self.losses.append(float(step.detach()))
        self.means.append({name: float(values[name].detach()) / total for name, total in totals.items() if total})
        self.optimizer.zero_grad(set_to_none=False)
        step.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.norms.append(norm)
        factor = min(1.0, self.plan.clip / (norm + 1e-6)) if self.plan.clip else 1.0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else factor * parameter.grad
        self.optimizer.step()

    def _summed(self, batches):
        """Return by term the sum of its weights over micro-batches, and of weight times loss."""
        plan = self.plan
        totals, values = dict.fromkeys(plan.terms, 0.0), dict.fromkeys(plan.terms, 0.0)
        for rank, one in batches:
            weights = weighs(plan, one)
            x, y = (part.double() for part in sample(rank, one.seed, 3))
            for (name, (unit, _)), vector in zip(plan.terms.items(), self.model(x, y), strict=False):
                totals[name] += weights[name]
                # A sum over turns that finish no rollout is a part of their rollout's loss.
                part = unit in ("rollout", "target") and one.tokens and name not in one.without
                summed = float(bool(weights[name] or part)) * vector.sum()
                values[name] = values[name] + (summed if plan.summed else weights[name] * vector.mean())
        return totals, values
