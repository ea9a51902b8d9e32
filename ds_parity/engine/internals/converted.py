"""Parameters that `model.to(dtype)` has converted since the engine was built: for one window, without an error.

On ZeRO 1 and 2 passes compute in that type until the next step, in which DeepSpeed writes its own weights back, in the
old type; on ZeRO 0 torch or DeepSpeed raises somewhere inside. Converted there and back, all is as it was, but for
BF16_Optimizer's (`Bf16._keep_in_place`). Measured in DeepSpeed 0.19.8 by tests/distributed/test_converted.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_parity.engine.internals.newcomers import names_of
from ds_parity.errors import WindowError

if TYPE_CHECKING:
    from ds_parity.engine.internals.surface import Parameter


class Types:
    """The types of the parameters as the engine was built."""

    def __init__(self) -> None:
        self._noted: list[torch.dtype] = []

    def note(self, named: list[tuple[str, Parameter]]) -> None:
        """Take these for right.

        Args:
            named: the model's parameters, by their names, in the order of later calls.
        """
        self._noted = [one.dtype for _, one in named]

    def refuse(self, named: list[tuple[str, Parameter]], window: int) -> None:
        """Raise WindowError where one that is trained has another type now.

        Args:
            named: as in `note`.
            window: index of the open window, for the message.
        """
        if [one.dtype for _, one in named] == self._noted:
            return
        pairs = zip(named, self._noted, strict=True)
        other = [(pair, noted) for pair, noted in pairs if pair[1].requires_grad and pair[1].dtype != noted]
        if other:
            (_, one), noted = other[0]
            raise WindowError(
                f"{names_of([pair for pair, _ in other])}: of {one.dtype} in window {window}, and of {noted} when the "
                "engine was built (model.to(dtype), half(), bfloat16(), float()): DeepSpeed steps weights of its own "
                "in the old type, and writes them back in the next step. Convert them back before a pass, or set the "
                "precision in the configuration (bf16, fp16, torch_autocast)"
            )
