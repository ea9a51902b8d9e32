"""A model whose losses are linear in its weights, so that what each micro-batch adds to a weight is known in any type.

A micro-batch names coordinates of its own: parameter, index and coefficient. Its loss is the sum of coefficient times
weight there, and its gradient is the coefficients, whatever the weights are. A weight that moved by anything else, or
not at all, is seen also in 16 bits, because a step moves it by far more than these round.
"""

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hard.unforeseen.windows import weighs

COEFFICIENT = 2.0**-7
SIZES = {"emb": 64, "lin": 64, "r1": 1, "r151": 151, "r5": 5, "r77": 77}
NAMES = tuple(sorted(SIZES))
FAILS = ("fails", 0, 1.0)  # a touch whose forward raises
OUTPUTS = ("list", "dict", "tuple")


class Row(nn.Module):
    """A parameter of any shape, of which the forward picks one number."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.5)

    def forward(self, index):
        return self.weight.reshape(-1)[index]


class Table(Row):
    """Likewise, by an embedding."""

    def forward(self, index):
        row, column = divmod(index, self.weight.shape[1])
        return nn.functional.embedding(torch.tensor([row], device=self.weight.device), self.weight)[0, column]


class Matrix(Row):
    """Likewise, by a matrix product, which torch_autocast runs in 16 bits."""

    def forward(self, index):
        row, column = divmod(index, self.weight.shape[1])
        x = torch.zeros(1, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
        x[0, column] = 1.0
        return nn.functional.linear(x, self.weight)[0, row]


class Linear(nn.Module):
    """Parameters of sizes that no number of ranks divides; the forward gives one scalar for each group of touches.

    Args:
        seed: of the weights.
        tied: one parameter is in two modules.
        checkpointed: the forward is run again in the backward.
        output: how it returns the scalars, one of OUTPUTS.
        spare: it has a parameter that no forward uses.
    """

    def __init__(self, seed, *, tied=False, checkpointed=False, output="list", spare=False):
        super().__init__()
        torch.manual_seed(seed)
        self.r151, self.emb, self.r5, self.r1 = Row(151), Table(16, 4), Row(5), Row(1)
        self.r77, self.lin = Row(7, 11), Matrix(4, 16)
        self.checkpointed, self.output, self.again = checkpointed, output, None
        if tied:
            self.again = Row(5)
            self.again.weight = self.r5.weight
        if spare:
            self.spare = Row(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, groups):
        self.calls += 1
        again = self.checkpointed and torch.is_grad_enabled()
        values = [checkpoint(self._sum, one, use_reentrant=False) if again else self._sum(one) for one in groups]
        return {"list": values, "dict": {"losses": values}, "tuple": (values, None)}[self.output]

    def _sum(self, touches):
        return sum(self._one(name, index).float() * factor for name, index, factor in touches)

    def _one(self, name, index):
        if (name, index) == FAILS[:2]:
            raise ZeroDivisionError("this forward fails, as one that finds no memory does")
        if name == "r5" and self.again is not None:
            return 0.5 * self.r5(index) + 0.5 * self.again(index)
        return getattr(self, name)(index)


def scalars(output):
    """The scalars that a forward has given in any of OUTPUTS."""
    if isinstance(output, dict):
        return output["losses"]
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Touch:
    """A micro-batch: what it touches, what it counts, and how a loop computes its loss.

    Attributes:
        seed: from which its coordinates and coefficients follow.
        uses: the parameters that it touches; by these its forward runs.
        terms: into how many terms these are divided.
        rollouts: its counts, as are prompts and tokens.
        prompts: likewise.
        tokens: likewise.
        weight: its own weight.
        nan: its loss is not finite.
        way: how the loss is computed, one of `linear_programs.WAYS`.
    """

    seed: int
    uses: tuple
    terms: int = 1
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: float = 0.0
    nan: bool = False
    way: str = "plain"

    @property
    def groups(self):
        """By term, the (parameter, index, coefficient) that it touches."""
        chance = random.Random(self.seed)
        factors = [COEFFICIENT * chance.choice((-2.0, -1.0, 0.5, 1.0, 1.5, 4.0)) for _ in self.uses]
        touches = [(name, self.seed * 37 % SIZES[name], one) for name, one in zip(self.uses, factors, strict=True)]
        return [touches[term :: self.terms] for term in range(self.terms)]

    @property
    def active(self):
        """Whether it contains anything."""
        return bool(self.rollouts or self.tokens or self.weight)

    def counts(self, program):
        """What `backward` is given."""
        counts = {name: getattr(self, name) for name in ("rollouts", "prompts", "tokens")}
        if program.weight == "weight":
            counts["weight"] = self.weight
        own = {name: self.weight for name, (unit, _) in program.terms.items() if unit == "weight"}
        return {**counts, "weight": own} if own else counts

    def factor(self, program):
        """What a loop that gives sums multiplies its loss by."""
        return weighs(program, self) if program.summed else 1
