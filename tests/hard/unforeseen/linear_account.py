"""What the steps of a program with linear losses should be: an account in fp64 of what each micro-batch adds where.

With every weight the account keeps how far one in low precision may be from it: in proportion to what was added to it,
so that a contribution that is lost, doubled or weighed wrongly stands out by far.
"""

import math

import torch

from tests.hard.unforeseen.linear_programs import RATES, WARMUP, falling, modelled
from tests.hard.unforeseen.windows import Windows, weighs

LOW, FP32 = 0.02, 2e-6  # of what was added: the greatest error of a type


class Account(Windows):
    """The weights of a program, step by step.

    Attributes:
        weights: flat and in fp64, by name.
        bounds: by name, how far each weight may be from these.
        frozen: names of parameters that are not trained.
        factors: by name, what a hook of the loop multiplies each gradient by.
        changed: by name, what the loop multiplies the gradient of the open window's step by.
    """

    def __init__(self, program):
        super().__init__(program)
        named = {name: one.detach() for name, one in modelled(program).named_parameters()}
        self.weights = {name: one.double().reshape(-1).clone() for name, one in named.items()}
        self.group = {name: number % program.groups for number, name in enumerate(named)}
        self.rates = list(RATES[: program.groups])
        self.low = FP32 if program.precision == "fp32" else LOW
        if program.more.get("communication_data_type", "fp32") != "fp32":
            self.low = LOW
        fp16 = "fp16" in program.precision or program.more.get("communication_data_type") == "fp16"
        self.least = 2.0**-22 if fp16 else 0.0  # it has no numbers below 2**-24
        rounds = 2.0**-8 if program.half else 0.0
        self.bounds = {name: one.abs() * rounds for name, one in self.weights.items()}
        self.frozen, self.factors, self.changed = set(), {}, {}
        self._momenta = {name: torch.zeros_like(one) for name, one in self.weights.items()}

    def kept(self):
        """All that a checkpoint has to keep; hooks are the loop's."""
        return {name: one for name, one in super().kept().items() if name != "factors"}

    def _begin(self):
        super()._begin()
        self.changed = {}

    def _settle(self, pieces, *, drop):
        shares = self._shares(pieces)
        finite = not any(piece.nan and share for piece, _, share in shares)
        added, much = self._added(shares)
        norm = math.sqrt(sum(float(one.pow(2).sum()) for one in added.values()))
        loss = self._loss(shares)
        applied, rates = bool(shares) and finite and not drop, self.rates_now()
        if applied:
            self._step(added, much, norm, rates)
        self.records.append(
            {
                **{name: sum(getattr(one, name) for one in pieces) for name in ("rollouts", "prompts", "tokens")},
                "micro_batches": sum(one.active for one in pieces),
                "loss": loss if shares and finite else None,
                "norm": norm if applied else None,
                "rates": rates,
                "skipped": not applied,
                "gradients": added,
                "shares": [(piece.seed, share, piece.groups[term]) for piece, term, share in shares],
            }
        )
        return applied

    def _shares(self, pieces):
        """What part of the step each term of a micro-batch is: (micro-batch, number of the term, share)."""
        if not self.program.terms:
            total = self._total(pieces)
            return [(one, 0, weighs(self.program, one) / total) for one in pieces] if total else []
        shares = []
        for term, (unit, coefficient) in enumerate(self.program.terms.values()):
            weights = [one.weight if unit == "weight" else _in_units(unit, one) for one in pieces]
            if total := sum(weights):
                parts = [coefficient * own / total for own in weights]
                shares += [(one, term, part) for one, part in zip(pieces, parts, strict=True)]
        return shares

    def _added(self, shares):
        """The gradient, and by how much its parts have moved it in all."""
        added = {name: torch.zeros_like(one) for name, one in self.weights.items()}
        much = {name: torch.zeros_like(one) for name, one in self.weights.items()}
        for name, index, part in self._touched(shares):
            if name not in self.frozen:
                own = part * self.factors.get(name, 1.0) * self.changed.get(name, 1.0)
                added[name][index] += own
                much[name][index] += abs(own)
        return added, much

    def _touched(self, shares):
        for piece, term, share in shares:
            for name, index, factor in piece.groups[term]:
                yield f"{name}.weight", index, share * factor

    def _loss(self, shares):
        """The step's loss, and how far it may be from that."""
        loss = off = 0.0
        for name, index, own in self._touched(shares):
            weight, bound = float(self.weights[name][index]), float(self.bounds[name][index])
            loss += own * weight
            off += abs(own) * (max(self.low, 1e-5) * abs(weight) + bound)
        return loss, off + 1e-5

    def _step(self, added, much, norm, rates):
        factor = min(1.0, self.program.clip / (norm + 1e-6)) if self.program.clip else 1.0
        for name, gradient in added.items():
            rate = rates[self.group[name]]
            self._momenta[name] = self.program.momentum * self._momenta[name] + factor * gradient
            self.weights[name] = self.weights[name] - rate * self._momenta[name]
            clipped = gradient.abs() if self.program.clip else 0.0  # the norm is rounded, too
            off = factor * self.low * (3 * much[name] + clipped) + self.least * (much[name] > 0)
            self.bounds[name] = self.bounds[name] + rate * off + 1e-6

    def rates_now(self):
        """The learning rate of each group in the coming step."""
        if not self.program.schedule:
            return list(self.rates)
        if self.program.schedule == "warmup":
            least, part = WARMUP["warmup_min_lr"], max(0, self._steps - 1) / WARMUP["warmup_num_steps"]
            return [least + (rate - least) * min(1.0, part) for rate in self.rates]
        by_step = self.program.progress == "optimizer_step"
        return [rate * falling(self._steps if by_step else self._progress / self.program.target) for rate in self.rates]


def _in_units(unit, piece):
    return {"rollout": piece.rollouts, "token": piece.tokens, "pass": int(piece.active)}[unit]
