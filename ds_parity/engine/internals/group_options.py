"""What the groups of an optimizer say beside their parameters: rates, decays, betas. Ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from ds_parity.engine.internals.surface import Engine

CLIPPING: Final = "gradient_clipping"
# What loops and schedulers give. Some optimizers keep there what they measure, of this rank's part (Prodigy's `d`).
_KNOWN = frozenset(
    [
        "alpha",
        "amsgrad",
        "beta1",
        "beta2",
        "betas",
        "bias_correction",
        "centered",
        "dampening",
        "eps",
        "lr",
        "lr_decay",
        "maximize",
        "momentum",
        "nesterov",
        "rho",
        "weight_decay",
    ]
)
_COMPARED = sorted(_KNOWN - {"lr"})  # beside the rates, which `engine.get_lr()` gives
_PLAIN = (bool, int, float, str, list, tuple, torch.Tensor)


def numbers_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return what a parameter group says to its optimizer, by name, the same words for groups that say the same.

    Args:
        group: of the optimizer, or that is to be given to one. A loop may keep other things there.
    """
    told = {name: _in_digits(group[name]) for name in _KNOWN & {*group}}
    return {name: said for name, said in told.items() if said}


class Options:
    """The numbers that a step would use, as ranks compare them before it.

    All ranks begin with the same ones, which `ds_parity.initialize` has compared.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun = [self._of(group) for group in engine.optimizer.param_groups]
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
            told += [(f"{name} of {_group(at)}", value) for name, value in self._changed(at, group)]
        scale = self._engine.optimizer.loss_scale if self._engine.fp16_enabled() else None
        told += [("the loss scale", f"{scale:g}")] if isinstance(scale, int | float) else []
        clips = [clip for clip in dict.fromkeys(self._clip()) if clip not in self._clips]
        return (*told, (CLIPPING, " and ".join(clips))) if clips else tuple(told)

    def _clip(self) -> list[str]:
        both = (self._engine.gradient_clipping(), getattr(self._engine.optimizer, "clip_grad", None))
        return [_in_digits(one) for one in both]

    def _changed(self, at: int, group: Mapping[str, Any]) -> list[tuple[str, str]]:
        begun = self._begun[at] if at < len(self._begun) else {}
        changed = [(name, it) for name, it in self._of(group).items() if it != begun.get(name)]
        return [(name, it if isinstance(it, str) else _in_digits(it)) for name, it in changed]

    def _of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _noted(group[name]) for name in _COMPARED if isinstance(group.get(name), _PLAIN)}


def _group(at: int) -> str:
    return f"parameter group {at}"


def _noted(value: Any) -> Any:
    # What is on a device is not looked at in each step: the host would wait for it.
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return _in_digits(value) if isinstance(value, list | tuple) else value


def _in_digits(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_in_digits, value))})"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{float(value):.7g}"  # those of fp32: a tensor's are the same number
    return repr(value) if isinstance(value, bool | str) else ""
