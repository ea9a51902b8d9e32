"""How far two traces may lie apart, and how their distance is measured."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ds_parity.errors import ConfigError
from ds_parity.trace import Header, Weights


class Tier(StrEnum):
    """How like two traces must be: bit for bit, or the same sums added up in another order."""

    EXACT = "exact"
    REASSOCIATED = "reassociated"


# Machine epsilon: the distance from 1 to the next number.
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}

# In units of eps * sqrt(rollouts). Measured by `ds-parity calibrate` (seeds 0 and 1): 400 random clean scenarios over
# ZeRO 0-3 on 2 ranks, SGD and AdamW, all loss weights, padded and packed, against the torch reference (fp64, the whole
# window as one batch); DeepSpeed 0.19.8, torch 2.13.0 on a CPU. The greatest seen, loss / grad_norm / weights:
#     fp32  1.85 / 1.44 / 2.46
#     bf16  0.18 / 0.23 / 0.040
# times 3 to 4. Weights lie below 0.085 but for AdamW, which divides by the root of the second moment: where a gradient
# is nothing but rounding, it moves a weight by a whole learning rate. bf16 lies lower: its forward errors average out
# over tokens. fp16 is not measured, but taken from bf16, and fp64 from fp32. A false alarm is a reason to look for a
# bug first.
_WIDE = {"loss": 5.5, "grad_norm": 4.5, "weights": 7.5}
_HALF = {"loss": 0.7, "grad_norm": 0.9, "weights": 0.16}
C = {"fp64": _WIDE, "fp32": _WIDE, "bf16": _HALF, "fp16": _HALF}

# What bf16 explains of the distance between two runs' weights, beside fp32 rounding (`C["fp32"]`) and the rounding of
# weights that were recorded in bf16 (`stored_rounding`), in two parts. Every gradient is off by a part of its length,
# and to the same side in every step, so that the distance grows with the way: DRIFT times the lengths of all updates.
# Optimizers that divide each weight's gradient by its size (Adam, Lion) also move a weight by a whole learning rate
# where its gradient is nothing but rounding; these errors have no side, and grow as the root of the squared lengths:
# TURN times that. SGD doesn't, so that it has the first part alone (`LINEAR`). Both are 2.5 times the greatest seen in
# 416 clean scenarios (0.012 with SGD, 0.114 with AdamW): bf16 training with fp32 master weights, written out in plain
# torch, against the fp64 reference; 4 to 40 windows, rates over four decades. In 115 scenarios of DeepSpeed's own
# engine on ZeRO 0 to 3 the greatest difference was 0.41 of its bound. fp16 rounds eight times finer, is not measured,
# and has those of bf16.
DRIFT = {"bf16": 0.03, "fp16": 0.03}
TURN = 0.25
# Weights that have gone as far as this part of their norm give other gradients where they differ, so that differences
# feed on themselves (0.027 of the way with SGD at a rate of 5, after 0.22 of the norm): the first part grows with it.
FAR = 0.1
LINEAR = ("sgd",)

# A distance that follows from sketches is right to 12.5 % (32 numbers, one sigma): no more than 4 sigma are allowed.
_SPREAD = 1.5

# Losses are compared relative to the greatest of the reference, and to no less than this: a policy gradient's loss is a
# difference of terms of the order 1 and more (advantages of variance 1, log probabilities): next to 0 it is as exact as
# they are.
LEAST_LOSS = 0.5

# Metrics, too, and to no less than this: one may be a mean of differences of terms of the order 1, as a KL is
# (exp(d) - d - 1, which is 1e-5 where the policy has hardly moved). Over 80 drawn clean trainings (GRPO, PPO, policy
# gradients; 538 steps each in fp32, bf16 and fp16) the greatest error of such a KL was 0.015 (fp32), 0.007 (bf16),
# 0.011 (fp16) times eps * sqrt(rollouts), which is 0.003, 0.009 and 0.015 of the constant C. In short types this is 2.5
# times as much, because real differences lie within it: a KL of 1e-3 that is twice as large, for example. In long ones
# it hides next to nothing, and is more, for models whose log probabilities are larger than theirs. A metric that is a
# policy's loss errs by 0.06 (fp32), 0.09 (bf16), 0.2 (fp16) of C in the same measure, and is compared as the loss.
LEAST_METRIC = {"fp64": 0.05, "fp32": 0.05, "bf16": 0.025, "fp16": 0.04}

# Of preferences (DPO) the rewards and their margins are beta times a difference of log probabilities of whole answers,
# sums of hundreds each. In 15 clean pairs of runs (answers of 64 and 256 tokens, beta 0.1, 120 steps) two ways to split
# a window took them apart by up to 0.37 (fp32) and 0.065 (bf16, also beside fp32) in the measure above, and the margins
# of 2 shorter clean runs in fp16 by 0.07. These are 2.5 to 2.7 times as much.
LEAST_REWARD = {"fp64": 1.0, "fp32": 1.0, "bf16": 0.16, "fp16": 0.18}
_OF_PREFERENCES = {"chosen", "rejected", "margin", "margins"}

# A gradient of log probabilities is a sum of probabilities less 0 or 1, which fp32 has to eps of 1 and not of the sum:
# where a policy is sure of its tokens, the norm is small, and is as exact as this one would be. Of 200 drawn clean
# trainings (GRPO in fp32; 1,784 steps) the error was at most 3.4 eps * sqrt(rollouts) but for two such policies, with
# norms of 0.002, where it was 47 and 49, and is 2.9 with this least. A loss in other units has other norms, so it is no
# more than SURE times the usual norm: that hides 1.6e-5 * sqrt(rollouts) of a norm at most. In short types the logits'
# own rounding is more: the greatest error was 0.63 of the constant 0.9.
LEAST_NORM = {"fp64": 0.05, "fp32": 0.05, "bf16": 0.0, "fp16": 0.0}
SURE = 30

_PARTS = re.compile(r"[^a-z]+")
_BESIDE_KL = frozenset(("with", "without", "plus", "minus", "no"))  # of the name of a loss that has a KL in it or not
_HUMPS = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class Bound:
    """The relative difference that adding the same terms in another order explains: c * eps * sqrt(terms).

    Attributes:
        constant: c, measured (see `C`).
        eps: machine epsilon of the type that the run computes in.
        terms: rollouts summed up to and including the step: the gradient of each is one summand, and errors add up over
            steps. Fewer than 1 count as 1. For the mean over steps: their mean.
    """

    constant: float
    eps: float
    terms: float

    @property
    def relative(self) -> float:
        """For the difference of one step."""
        return self.constant * self.eps * math.sqrt(max(self.terms, 1))

    def mean(self, steps: int) -> float:
        """For the mean signed difference over `steps` (>= 1) steps: rounding has no side, so it averages out.

        With `terms` averaged over the steps, this is the bound of a mean of independent errors: the root mean square of
        the bounds of the steps, over sqrt(steps).
        """
        return self.relative / math.sqrt(steps)

    def __str__(self) -> str:
        return f"{self.constant:g} * {self.eps:.3g} * sqrt({max(self.terms, 1):.15g} rollouts)"


def eps(dtype: str) -> float:
    """Machine epsilon of `fp64`, `fp32`, `bf16` or `fp16`.

    Raises:
        ConfigError: for any other type.
    """
    if dtype not in EPS:
        raise ConfigError(f"dtype {dtype!r} has no bound: it must be one of {', '.join(EPS)}")
    return EPS[dtype]


def least_metric(name: str, dtype: str) -> float:
    """Return what a metric is compared relative to at the least (>= 0): nothing, where it is a learning rate.

    That is set, and not summed up. It is known by its name: a part of it is "lr" (`actor/lr`, `lr0`, `actorLr`), or it
    says "learning rate" in whatever spelling. One with "loss" in its name is as exact as a loss, unless it is that of a
    KL (`kl_loss`, `actor/klLoss`). Those of preferences are known by their names, too (`rewards/chosen`).
    """
    parts = _PARTS.split(_HUMPS.sub("_", name).lower())
    if "learningrate" in "".join(parts) or not {"lr", "lrs"}.isdisjoint(parts):
        return 0.0
    if not _OF_PREFERENCES.isdisjoint(parts):
        return LEAST_REWARD[dtype]
    of_kl = any(part.startswith("kl") or part.endswith("kl") for part in parts) and _BESIDE_KL.isdisjoint(parts)
    return LEAST_LOSS if "loss" in name.lower() and not of_kl else LEAST_METRIC[dtype]


def least_norm(usual: float, dtype: str) -> float:
    """Return what a gradient norm is compared relative to at the least (>= `usual`, that of the reference)."""
    return max(usual, min(LEAST_NORM[dtype], SURE * usual))


def stored_rounding(reference: Header, candidate: Header, dtype: str) -> float:
    """Return how far weights lie apart (>= 0, relative to their norm) because a trace tells of them in a short type.

    Rounding to nearest errs by up to half the distance of two numbers, evenly: by eps / sqrt(12) of a number at most,
    root mean square. A trace without a start doesn't say in which type it tells of weights: it is that of the run.
    """
    types = [it.start.dtype if it.start is not None else dtype for it in (reference, candidate)]
    return _SPREAD * math.hypot(*(EPS[it] / math.sqrt(12) for it in types if it in DRIFT))


def has_nan(value: object) -> bool:
    """Whether a value is NaN or holds one."""
    if isinstance(value, tuple):
        return any(has_nan(item) for item in value)
    if isinstance(value, Weights):
        return any(map(math.isnan, (value.norm, *value.sketch)))
    return isinstance(value, float) and math.isnan(value)


def greatest(values: Iterable[float]) -> float:
    """The greatest of some gaps, 0 for none; NaN if one is NaN, which `max` would lose."""
    known = list(values)
    return math.nan if any(math.isnan(value) for value in known) else max(known, default=0.0)
