"""The loss, the gradient norm and the weights of a step under known faults, computed from the weights before it.

It costs three backwards over each rollout, and a copy of model and optimizer for each fault, some 25 of them. So it is
done for small models alone, and for the first steps (`MOST_WEIGHTS`, `MOST_STEPS`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ds_parity.parity.running.own_batches import Record, sketches
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow
from ds_parity.parity.subjects.references.hypotheses import SUMS, Supposing
from ds_parity.parity.subjects.references.torch_counterparts import clip_limit, clipped_step
from ds_parity.trace import Hypothesis

MOST_WEIGHTS = 500_000
MOST_STEPS = 8
# Numbers of a sketch that a hypothesis keeps: each is the sum of every eighth number of a trace's own sketch.
FOLDED = 8
# Digits that are kept: what fp32 is compared to is 1e-6 of a figure, and 1 % of an update.
_OF_FIGURES, _OF_WEIGHTS = 10, 4
# Gradients and weights that differ by less are the same but for rounding.
_SAME = 1e-9


Change: TypeAlias = Callable[[torch.optim.Optimizer], None]


def _afresh(optimizer: torch.optim.Optimizer) -> None:
    """Lose the whole state."""
    optimizer.state.clear()


def _counts_afresh(optimizer: torch.optim.Optimizer) -> None:
    """Lose the count of steps alone, as Adam has it."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = torch.zeros_like(state["step"])


def _without_decay(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0


_CHANGES = {"optimizer-afresh": _afresh, "step-count-afresh": _counts_afresh, "no-weight-decay": _without_decay}
_DEFAULT_LIMIT = 1.0  # DeepSpeed's, where the configuration says nothing of clipping


class Suppositions:
    """Computes what the steps of one run would have been.

    Args:
        scenario: of the run; its loss is the bundled one.
        model: in fp64, as it is trained.
        optimizer: that trains it.
        record: that steps are handed to; where it takes no hypotheses, none are computed.
    """

    def __init__(self, scenario: Scenario, model: nn.Module, optimizer: torch.optim.Optimizer, record: Record) -> None:
        self._scenario, self._model, self._optimizer = scenario, model, optimizer
        self._settings, self._layout, self._passes = scenario.settings, scenario.layout(), scenario.batches()
        self._before: Tensor | None = None
        small = sum(parameter.numel() for parameter in model.parameters()) <= MOST_WEIGHTS
        self._sketch = sketches(record)
        wanted = self._sketch is not None and small and self._settings.terms is None
        self._left = MOST_STEPS if wanted else 0

    def of(self, window: PlannedWindow) -> dict[str, Hypothesis] | None:
        """Return what known faults would make of the next step, by name; the model is as it is before the step.

        Those that make no difference are left out. None: not computed.
        """
        if not self._left or not window.total:
            return None
        self._left -= 1
        uses = self._model.objective == "policy_gradient"
        supposing = Supposing(window, self._passes, self._layout, self._settings, bool(uses))
        values, gradients = self._sums(supposing)

        def loss_and_gradient(coefficients: Tensor) -> tuple[float, Tensor]:
            flat = -coefficients.flatten()
            return float(flat @ values), flat @ gradients

        loss, right = loss_and_gradient(supposing.right)
        supposed = {name: loss_and_gradient(it) for name, it in supposing.all().items()}
        if self._before is not None:
            supposed["gradient-kept"] = loss, right + self._before
        self._before = right
        after, _ = self._stepped(right)
        found = {
            name: self._hypothesis(gradient, right, after, own if abs(own - loss) > _SAME else None)
            for name, (own, gradient) in supposed.items()
            if float((gradient - right).norm()) > _SAME * float(right.norm()) or abs(own - loss) > _SAME
        }
        return found | _not_reduced(found) | dict(self._of_steps(right, after))

    def _of_steps(self, right: Tensor, after: Tensor) -> Iterator[tuple[str, Hypothesis]]:
        """Yield what other clipping, and an optimizer with another state, make of the right gradient."""
        ranks = self._scenario.ranks
        limit = clip_limit(self._scenario)
        limits = {"clipped-over-ranks": limit / ranks, "clipped-times-ranks": limit * ranks}
        limits |= {"clipped-at-default": _DEFAULT_LIMIT, "not-clipped": math.inf}
        made = {name: self._hypothesis(right, right, after, None, limit=at) for name, at in limits.items()}
        made |= {name: self._hypothesis(right, right, after, None, change=how) for name, how in _CHANGES.items()}
        size = float(right.norm())
        for name, it in made.items():
            # Rounding in fp64 moves the sketch a little, too.
            if size and max(map(abs, it.apart)) > _SAME * float(after.abs().max()):
                yield name, it

    def _sums(self, supposing: Supposing) -> tuple[Tensor, Tensor]:
        """Return what log probabilities come to in each of `SUMS`, rollout by rollout, and their gradients.

        Returns:
            (len(SUMS) * B,) and (len(SUMS) * B, parameters), all rollouts of the first sum, then those of the second.
        """
        held = [(one, cell) for cell in supposing.cells for one in cell.held]
        values, rows = [], []
        for one, cell in held:
            longest = max(len(other.tokens) for other in cell.held)
            tokens = torch.tensor([[*one.tokens, *(0,) * (longest - len(one.tokens))]], device="cpu")
            logits = self._model.policy(tokens)  # type: ignore[operator]
            logps = getattr(logits, "logits", logits)[:, :-1].double().log_softmax(-1)
            chosen = logps.gather(-1, tokens[:, 1:].unsqueeze(-1)).flatten()
            own = chosen[: len(one.tokens) - 1]
            sums = own[one.prompt_length - 1 :].sum(), own.sum(), chosen.sum()
            values.append([float(it.detach()) for it in sums])
            found = [self._gradient(it) for it in sums[:2]]
            rows.append([*found, found[1] if len(own) == len(chosen) else self._gradient(sums[2])])
        places = [(place, at) for place in range(len(SUMS)) for at in range(len(held))]
        return (
            torch.tensor([values[at][place] for place, at in places], dtype=torch.float64, device="cpu"),
            torch.stack([rows[at][place] for place, at in places]),
        )

    def _gradient(self, value: Tensor) -> Tensor:
        """Return the gradient of a number as one vector, of all parameters that are trained."""
        trained = self._trained(self._model)
        found = torch.autograd.grad(value, trained, retain_graph=True, allow_unused=True)
        pairs = zip(found, trained, strict=True)
        return torch.cat([(torch.zeros_like(own) if it is None else it).flatten() for it, own in pairs])

    def _stepped(
        self,
        gradient: Tensor,
        limit: float | None = None,
        change: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> tuple[Tensor, float | None]:
        """Return a sketch of the weights after a step with this gradient, (FOLDED,), and its norm before clipping."""
        parameters, optimizer = self._copied()
        first = 0
        for parameter in self._trained(parameters):
            parameter.grad = gradient[first : first + parameter.numel()].view_as(parameter).clone()
            first += parameter.numel()
        if change is not None:
            change(optimizer)
        norm = clipped_step(parameters, optimizer, self._scenario, limit)
        weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        assert self._sketch is not None
        return torch.tensor(self._sketch(weights), dtype=torch.float64, device="cpu").view(-1, FOLDED).sum(0), norm

    def _copied(self) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        # A model may keep what can't be copied: torch copies no output of a forward that has a graph.
        copies = {
            id(one): nn.Parameter(one.detach().clone(), one.requires_grad) for one in self._model.parameters()
        }  # fmt: skip
        return nn.ParameterList(copies.values()), copy.deepcopy(self._optimizer, {**copies})

    def _hypothesis(
        self, gradient: Tensor, right: Tensor, after: Tensor, loss: float | None, **other: Any
    ) -> Hypothesis:
        weights, norm = self._stepped(gradient, **other)
        square = float(right @ right)
        return Hypothesis(
            loss=None if loss is None else _short(loss, _OF_FIGURES),
            grad_norm=None if norm is None else _short(norm, _OF_FIGURES),
            along=_short(float(gradient @ right) / square, _OF_FIGURES) if square else None,
            apart=tuple(_short(it, _OF_WEIGHTS) for it in (weights - after).tolist()),
        )

    @staticmethod
    def _trained(model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _not_reduced(found: dict[str, Hypothesis]) -> dict[str, Hypothesis]:
    """Return ranks on their own once more, with the norm that DeepSpeed then tells on ZeRO 0: the mean over ranks."""
    alone = {name: it for name, it in found.items() if name.startswith("rank-alone:")}
    norms = [it.grad_norm for it in alone.values() if it.grad_norm is not None]
    if len(norms) < 2 or "rank-alone:0" not in alone:
        return {}
    mean = _short(sum(norms) / len(norms), _OF_FIGURES)
    return {"not-reduced:0": alone["rank-alone:0"].model_copy(update={"grad_norm": mean})}
