"""What the groups of an optimizer say and hold: rates, decays, betas, parameters. Ranks compare them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from deepspeed.moe.utils import is_moe_param

from ds_parity.engine.internals.surface import Engine

CLIPPING: Final = "gradient_clipping"
# What loops and schedulers give, to torch's optimizers, DeepSpeed's, and others. Some optimizers keep there what they
# measure, of this rank's part (Prodigy's `d`).
_KNOWN = frozenset(
    [
        *("alpha", "amsgrad", "beta1", "beta2", "beta2_decay", "betas", "bias_correction", "cautious", "centered"),
        *("clip_threshold", "d_coef", "dampening", "decay_rate", "decouple", "decoupled_weight_decay", "eps"),
        *("eps_inside_sqrt", "etas", "growth_rate", "initial_accumulator_value", "lambd", "lr", "lr_decay"),
        *("max_coeff", "max_grad_norm", "maximize", "min_coeff", "momentum", "momentum_decay", "nesterov"),
        *("ns_coefficients", "ns_steps", "r", "rho", "step_sizes", "t0", "warmup_steps", "weight_decay"),
        "weight_lr_power",
    ]
)
_COMPARED = sorted(_KNOWN - {"lr"})  # beside the rates, which `engine.get_lr()` gives
_MOST = 64  # numbers of one option


def numbers_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return what a parameter group says to its optimizer, by name, the same words for groups that say the same.

    Args:
        group: of the optimizer, or that is to be given to one. A loop may keep other things there.
    """
    told = {name: _in_digits(group[name]) for name in _KNOWN & {*group}}
    return {name: said for name, said in told.items() if said}


class Options:
    """The numbers that a step would use, and the parameters that it would step, as ranks compare them before it.

    All ranks begin with the same ones, which `ds_parity.initialize` has compared.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun = [_Said(group) for group in engine.optimizer.param_groups]
        self._clips = self._clip()

    def told(self) -> tuple[tuple[str, str], ...]:
        """Return names and values, in digits because a NaN is not equal to another.

        They are the learning rate of each parameter group, what else of a group has changed since the engine was built,
        the loss scale in fp16, and what clips if that has changed.
        """
        told = [
            (f"the learning rate of {_group(at)}", repr(float(rate))) for at, rate in enumerate(self._engine.get_lr())
        ]
        for at, group in enumerate(self._engine.optimizer.param_groups):
            begun = self._begun[at] if at < len(self._begun) else None
            changed = _Said(group).all() if begun is None else begun.changed(group)
            told += [(f"{name} of {_group(at)}", value) for name, value in changed]
            if begun is None or not begun.holds_the_same(group):
                told.append((f"the parameters of {_group(at)}", self._names(group)))
        scale = self._engine.optimizer.loss_scale if self._engine.fp16_enabled() else None
        told += [("the loss scale", f"{scale:g}")] if isinstance(scale, int | float) else []
        clips = [clip for clip in dict.fromkeys(self._clip()) if clip not in self._clips]
        return (*told, (CLIPPING, " and ".join(clips))) if clips else tuple(told)

    def _clip(self) -> list[str]:
        both = (self._engine.gradient_clipping(), getattr(self._engine.optimizer, "clip_grad", None))
        return [_in_digits(one) for one in both]

    def _names(self, group: Mapping[str, Any]) -> str:
        """Return how many parameters a group has, the first one, and a checksum of their names, in their order."""
        # ZeRO steps what it has made of the model's parameters, and each rank has experts of its own.
        named = self._engine.module.named_parameters()
        names = {id(one): name for name, one in named if not is_moe_param(one)}
        own = [names.get(id(one), "") for one in group["params"]]
        first = next(filter(None, own), "none of the model")
        return f"{len(own)}, the first of which is {first} (names {zlib.crc32(repr(own).encode()):08x})"


class _Said:
    """What a group said when the engine was built.

    Args:
        group: of the optimizer.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._values = {name: group.get(name) for name in _COMPARED if name in group}
        self._digits = {name: _noted(value) for name, value in self._values.items()}
        self._fixed = {name for name, value in self._values.items() if _is_fixed(value)}
        self._keys, self._held = tuple(group), _held(group)

    def all(self) -> list[tuple[str, str]]:
        """Return names and values."""
        return [(name, said) for name, said in self._digits.items() if said]

    def changed(self, group: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return names and values of what is another one now."""
        names = self._values if tuple(group) == self._keys else [name for name in _COMPARED if name in group]
        changed = []
        for name in names:
            value = group.get(name)
            if name in self._fixed and value is self._values[name]:
                continue
            if (said := _noted(value)) != self._digits.get(name, ""):
                changed.append((name, said or "what is no number"))
        return changed

    def holds_the_same(self, group: Mapping[str, Any]) -> bool:
        """Return whether a group holds the parameters that it held, in their order."""
        return _held(group) == self._held


def _is_fixed(value: Any) -> bool:
    """Whether a value can't change by itself, and need not be read again."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, bool | int | float | str)


def _held(group: Mapping[str, Any]) -> int:
    return hash(tuple(map(id, group["params"])))


def _group(at: int) -> str:
    return f"parameter group {at}"


def _noted(value: Any) -> str:
    # What is on a device is not read in each step: the host would wait for it. How often it was written is known.
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return "a tensor" if value.is_inference() else f"a tensor that was written {value._version} times"
    return _in_digits(value)


def _in_digits(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        if math.prod(value.shape) > _MOST:
            return ""
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_in_digits, value))})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{float(value):.7g}"  # those of fp32: a tensor's are the same number
    return repr(value) if value is None or isinstance(value, bool | str) else ""
