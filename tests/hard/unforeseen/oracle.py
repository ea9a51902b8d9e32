"""What a step should be, computed in fp64 on one process by nothing but torch: the oracle, its models and its data."""

import copy

import torch
from torch import nn

RATE = 0.1
WIDTH = 6


class Net(nn.Module):
    """A small model whose forward is its loss: the mean of squared errors over the samples."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def predicted(self, x):
        """One number a sample."""
        return self.head(torch.tanh(self.body(x))).squeeze(-1)

    def forward(self, x, y, reduction="mean"):
        squares = (self.predicted(x) - y).pow(2)
        return squares.sum() if reduction == "sum" else squares.mean()


def sample(rank, index, size):
    """What rank `rank` has in pass `index`: inputs of shape (size, WIDTH) and labels of shape (size,), fp32."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)


def descent(model):
    """The optimizer of an oracle that is told of none."""
    return torch.optim.SGD(model.parameters(), lr=RATE)


class Oracle:
    """A copy of a model in fp64 that adds weight times gradient up, divides once, and closes its windows itself.

    Attributes:
        model: the copy.
        optimizer: torch's own.
        steps: the rollouts of each window that was closed.
        losses: the loss of each step.
        norms: the norm of each gradient, before clipping.
    """

    def __init__(self, model, target, *, clip=0.0, optimizer=descent, overshoot="carry", of_target=False):
        self.model = copy.deepcopy(model).double().cpu()
        self.optimizer = optimizer(self.model)
        self.steps, self.losses, self.norms = [], [], []
        self._target, self._clip, self._overshoot, self._of_target = target, clip, overshoot, of_target
        self._count, self._counted_from, self._closes_at = 0, 0, target
        self._begin()

    def add(self, weight, loss_of):
        """Run a micro-batch: `loss_of(model)` gives its loss, which weighs `weight` in numerator and divisor."""
        self.add_sum(loss_of, units=weight, factor=weight)

    def add_sum(self, loss_of, *, units, factor=1):
        """Run a micro-batch whose loss is a sum over so many units already."""
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        loss = loss_of(self.model)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._gradients[parameter] = self._gradients.get(parameter, 0) + factor * gradient
        self._loss += factor * float(loss.detach())
        self._units += units

    def end_pass(self, counted, rollouts=None):
        """Count what all ranks have brought, and step where that reaches the target."""
        self._count += counted
        self._rollouts += counted if rollouts is None else rollouts
        if self._count >= self._closes_at:
            self.step()
            self._closes_at = self._next_multiple() if self._overshoot == "carry" else self._begun_anew()

    def finish(self):
        """Step with what is left, if anything is; a surplus is forgotten."""
        if self._rollouts or self._units:
            self.step()
        self._closes_at = self._begun_anew()

    def drop(self):
        """Forget the open window."""
        self._closes_at = self._begun_anew()
        self._begin()

    def step(self):
        """Take the optimizer step of the window as it is."""
        total = self._target if self._of_target else self._units
        if total:
            gradients = {one: value / total for one, value in self._gradients.items()}
            norm = sum(float(value.pow(2).sum()) for value in gradients.values()) ** 0.5
            factor = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0
            for parameter in self.model.parameters():
                gradient = gradients.get(parameter)
                parameter.grad = torch.zeros_like(parameter) if gradient is None else factor * gradient
            self.optimizer.step()
            self.losses.append(self._loss / total)
            self.norms.append(norm)
        self.steps.append(self._rollouts)
        self._begin()

    def _next_multiple(self):
        return self._count + self._target - (self._count - self._counted_from) % self._target

    def _begun_anew(self):
        self._counted_from = self._count
        return self._count + self._target

    def _begin(self):
        self._gradients, self._loss, self._units, self._rollouts = {}, 0.0, 0, 0
