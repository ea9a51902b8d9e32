"""Programs drawn at random from all public calls, in both driving modes: their configuration, and their oracle.

A program is drawn from a seed alike on every rank. The oracle knows the micro-batches of all ranks, closes windows
itself, computes each step in fp64 with nothing but torch, and shares nothing with ds_parity.
"""

import copy
import math
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hard.unforeseen.oracle import WIDTH

RATE = 0.05
KINDS = ("plain", "plain", "tied", "twice", "checkpointed", "reentrant")
LOSSES = ("plain", "module", "two-forwards", "fp64", "shape-1", "retained", "evaluates", "zeroes")


@dataclass(frozen=True)
class Program:
    """What a program is configured with; what it does is drawn while it runs.

    Attributes:
        seed: of all that is drawn.
        ranks: that run it.
        stage: of ZeRO.
        offload: the optimizer's state lies on the CPU.
        overlap: with overlap_comm.
        small: buckets are smaller than a layer.
        kind: of the model, one of KINDS.
        optimizer: `descent`, `momentum` or `adamw`.
        clip: the greatest norm of a gradient, 0.0 for any.
        schedule: how the scheduler is given: "" for none, `object` or `callable`.
        progress: `ds_parity.lr_progress`.
        caller: the caller ends windows.
        target: rollouts, or prompts, of a window; 0 where the caller ends it and none is set.
        overshoot: likewise a key of ds_parity, as are the next five.
        last: `last_window`.
        weight: `loss_weight`.
        summed: `loss_reduction` is `sum`.
        across: `across_ranks`.
        prompts: `count` is `prompt`.
        lookahead: of every passes() that gives none.
        loss: how the loop computes it, one of LOSSES.
        given: of which type counts are: `int`, `tensor` or `numpy`.
    """

    seed: int
    ranks: int
    stage: int
    offload: bool
    overlap: bool
    small: bool
    kind: str
    optimizer: str
    clip: float
    schedule: str
    progress: str
    caller: bool
    target: int
    overshoot: str
    last: str
    weight: str
    summed: bool
    across: str
    prompts: bool
    lookahead: int | str
    loss: str
    given: str


def drawn(seed, ranks):
    """Draw a program."""
    chance = random.Random(seed)
    pick, caller, stage = chance.choice, chance.random() < 0.55, chance.choice((0, 1, 2, 3))
    weight = pick(("rollout", "rollout", "token", "token", "pass", "target", "weight", "divided"))
    target = 0 if caller and weight != "target" and chance.random() < 0.5 else chance.randint(2, 14)
    kind, loss = pick(KINDS), pick(LOSSES)
    if kind == "reentrant" and (stage == 2 or loss == "retained"):  # torch refuses the one, DeepSpeed the other
        kind = "checkpointed"
    return Program(
        seed=seed,
        ranks=ranks,
        stage=stage,
        offload=stage > 0 and chance.random() < 0.25,
        overlap=stage > 0 and chance.random() < 0.35,
        small=chance.random() < 0.4,
        kind=kind,
        optimizer=pick(("descent", "momentum", "adamw")),
        clip=pick((0.0, 0.05, 0.7)),
        schedule=pick(("", "", "object", "callable")),
        progress=pick(("optimizer_step", "rollout")) if target else "optimizer_step",
        caller=caller,
        target=target,
        overshoot=pick(("carry", "reset")),
        last=pick(("step", "drop", "error")),
        weight=weight,
        summed=weight in ("rollout", "token") and chance.random() < 0.4,
        across=pick(("sum", "mean")),
        prompts=not caller and chance.random() < 0.2,
        lookahead=pick((0, 0, 1, 2, 3, 7) + (() if caller else ("window",))),
        loss=loss,
        given=pick(("int", "tensor", "numpy")),
    )


def configuration(program):
    """The extended configuration of a program."""
    zero = {"stage": program.stage, "overlap_comm": program.overlap}
    if program.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if program.small:
        zero |= {"reduce_bucket_size": 64, "allgather_bucket_size": 64}
    if program.small and program.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 80}
    section = {
        "exchange_timeout": 20.0,
        "last_window": program.last,
        "lr_progress": program.progress,
        "lookahead": program.lookahead,
        "count": "prompt" if program.prompts else "rollout",
        "loss_weight": program.weight,
        **({"boundary": "caller"} if program.caller else {"overshoot": program.overshoot}),
        **({"across_ranks": program.across} if program.weight == "divided" else {}),
        **({"loss_reduction": "sum"} if program.summed else {}),
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": program.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "ds_parity": section,
        **({"gradient_accumulation_passes": program.target} if program.target else {}),
    }


class Layers(nn.Module):
    """Three layers; the forward is the mean of squared errors."""

    def __init__(self, kind, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.body, self.middle, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        if kind == "tied":
            self.other = nn.Linear(8, 8)
            self.other.weight = self.middle.weight

    def forward(self, x, y):
        hidden = self._middle(torch.tanh(self.body(x)))
        return (self.head(hidden).squeeze(-1) - y).pow(2).mean()

    def _middle(self, hidden):
        if self.kind in ("checkpointed", "reentrant") and torch.is_grad_enabled():
            return checkpoint(self._once, hidden, use_reentrant=self.kind == "reentrant")
        if self.kind == "tied":
            return torch.tanh(self.other(self._once(hidden)))
        return self._once(self._once(hidden)) if self.kind == "twice" else self._once(hidden)

    def _once(self, hidden):
        return torch.tanh(self.middle(hidden))


@dataclass(frozen=True)
class Piece:
    """A micro-batch: the seed and number of its samples, its counts, its own weight, and whether its loss is NaN."""

    seed: int
    size: int = 1
    rollouts: int = 0
    prompts: int = 0
    tokens: int = 0
    weight: float = 0.0
    nan: bool = False

    @property
    def inputs(self):
        """What the model runs."""
        generator = torch.Generator().manual_seed(self.seed)
        x, y = torch.randn(self.size, WIDTH, generator=generator), torch.randn(self.size, generator=generator)
        return {"x": x * math.nan if self.nan else x, "y": y}

    @property
    def active(self):
        """Whether it contains anything."""
        return bool(self.rollouts or self.tokens or self.weight)


def optimizer_of(program, model):
    """The optimizer that a program brings."""
    if program.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, eps=1e-3)
    momentum = 0.9 if program.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)


def falling(steps):
    """What the scheduler multiplies the rate by."""
    return 1 / (1 + 0.2 * steps)


def weighs(program, piece):
    """What the loss of a micro-batch weighs."""
    units = {"rollout": piece.rollouts, "target": piece.rollouts, "token": piece.tokens, "weight": piece.weight}
    return units.get(program.weight, int(piece.active))


class Right:
    """What the steps of a program should be.

    Attributes:
        model: in fp64.
        open: by pass of the open window, the micro-batches of all ranks; None for an idle one.
        rate: the learning rate that was set by hand.
        records: of all windows that were closed.
    """

    def __init__(self, program):
        self.program = program
        # By torch.autograd.grad there is no reentrant backward.
        kind = "plain" if program.kind in ("checkpointed", "reentrant") else program.kind
        self.model = Layers(kind).double()
        self.optimizer = optimizer_of(program, self.model)
        self.rate = RATE
        self.records, self.open = [], []
        self._steps, self._progress, self._consumed, self._origin = 0, 0, 0, 0
        self._begin()

    def passed(self, pieces):
        """Take a pass in; return whether it closes its window by its counts."""
        self.open.append(pieces)
        if self._consumed + self._units() < self._closes_at:
            return False
        self.close()
        return True

    def close(self, *, drop=False):
        """End the window: take its step, or none."""
        program, pieces = self.program, [one for own in self.open for one in own if one is not None]
        total = self._total(pieces)
        loss, gradients = self._summed(pieces, total)
        finite = not any(one.nan and weighs(program, one) for one in pieces)
        applied, rate, units = bool(total) and finite and not drop, self._rate_now(), self._units()
        norm = float(sum(one.pow(2).sum() for one in gradients) ** 0.5) if applied else None
        if applied:
            self._step(gradients, norm, rate)
            self._steps, self._progress = self._steps + 1, self._progress + units
        self.records.append(
            {
                **{name: sum(getattr(one, name) for one in pieces) for name in ("rollouts", "prompts", "tokens")},
                "micro_batches": sum(one.active for one in pieces),
                "total": float(total),
                "loss": loss if total and finite else None,
                # Without clipping torch's own optimizer has none.
                "norm": norm if program.stage or program.clip else None,
                "rate": rate,
                "skipped": not applied,
            }
        )
        self._consumed += units
        if program.caller or self._consumed < self._closes_at:
            self._origin = self._consumed
        self._begin()

    def finish(self):
        """Settle an open window; the next data begins with a whole one."""
        if self.open:
            self.close(drop=self.program.last == "drop")
        self._origin = self._consumed
        self._begin()

    def kept(self):
        """All that a checkpoint has to keep."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "records"})

    def load(self, kept):
        """Go back to there."""
        vars(self).update(copy.deepcopy(kept))

    def _begin(self):
        self.open = []
        target, carried = self.program.target, self.program.overshoot == "carry" and not self.program.caller
        surplus = (self._consumed - self._origin) % target if carried else 0
        self._closes_at = self._consumed + target - surplus

    def _units(self):
        name = "prompts" if self.program.prompts else "rollouts"
        return sum(getattr(one, name) for own in self.open for one in own if one is not None)

    def _total(self, pieces):
        program, total = self.program, sum(weighs(self.program, one) for one in pieces)
        constants = {"target": program.target, "divided": 1 if program.across == "sum" else program.ranks}
        return constants.get(program.weight, total) if total else 0

    def _summed(self, pieces, total):
        parameters, summed = list(self.model.parameters()), 0.0
        gradients = [torch.zeros_like(one) for one in parameters]
        for piece in pieces:
            share = weighs(self.program, piece) / total if total else 0
            if share:
                loss = self.model(**{name: one.double() for name, one in piece.inputs.items()})
                for gradient, own in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
                    gradient.add_(own, alpha=share)
                summed += share * float(loss.detach())
        return summed, gradients

    def _step(self, gradients, norm, rate):
        factor = min(1.0, self.program.clip / (norm + 1e-6)) if self.program.clip else 1.0
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = factor * gradient
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _rate_now(self):
        if not self.program.schedule:
            return self.rate
        by_step = self.program.progress == "optimizer_step"
        return RATE * falling(self._steps if by_step else self._progress / self.program.target)
