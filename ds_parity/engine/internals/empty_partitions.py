"""Ranks whose partition of a parameter group is padding alone, and loads that look for a parameter in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from deepspeed.utils.tensor_fragment import fragment_address

from ds_parity.engine.internals.surface import Engine, Zero12Parameter

_NO_STATES: Final = {"fp32", "step"}  # files of a parameter that are no state of its elements


class _NoElements:
    """The place of a parameter's states in a partition that has none of its elements."""

    def __init__(self) -> None:
        self.optim_fragment: dict[str, torch.Tensor] = {}

    def load(self, folder: str, *_: Any, **__: Any) -> Any:
        """Read which states a parameter's folder has, and return its count of steps; None where it has none."""
        names = {file.stem for file in Path(folder).glob("*.pt")}
        self.optim_fragment = {name: torch.empty(0, device="cpu") for name in sorted(names - _NO_STATES)}
        return torch.load(Path(folder, "step.pt"), weights_only=False) if "step" in names else None

    def get_optim_state_keys(self) -> list[str]:
        """Return the names of the states."""
        return [*self.optim_fragment]

    def get_hp_fragment_address(self) -> Any:
        """Return a place of no length."""
        return fragment_address(numel=0, start=0)

    def get_hp_fragment(self, optim_state_key: str) -> torch.Tensor:
        """Return what lies there of a state: nothing."""
        return self.optim_fragment[optim_state_key]


@contextmanager
def empty_partitions(engine: Engine) -> Iterator[None]:
    """Let a rank load a universal checkpoint of which a group's partition has nothing but padding for it.

    A group of few elements ends before the partition of the last rank begins. DeepSpeed takes the count of steps from
    the parameters of the partition there, and raises an IndexError, for which the other ranks wait (0.19.8,
    runtime/base_optimizer.py, load_hp_checkpoint_state_from_checkpoint_dir; universal_empty_partition.py). Inside, the
    group's first parameter tells the count and the states, and has no elements.
    """
    optimizer: Any = engine.optimizer if engine.load_universal_checkpoint() else None
    groups: Any = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", ())
    empty = [cast("Zero12Parameter", group[0]) for group in groups if group and not any(map(_is_mapped, group))]
    loads = [getattr(one, "load_hp_checkpoint_state", None) for one in empty]
    for one in empty:
        one._hp_mapping = nothing = _NoElements()
        one.load_hp_checkpoint_state = nothing.load
    try:
        yield
    finally:
        for one, load in zip(empty, loads, strict=True):
            one._hp_mapping, one.load_hp_checkpoint_state = None, load


def _is_mapped(parameter: object) -> bool:
    # Without the attribute a wrapper has no universal checkpoints.
    return getattr(parameter, "_hp_mapping", parameter) is not None
