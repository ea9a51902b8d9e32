"""Steps that are skipped because their gradient is not finite, told before a run has trained nothing for long.

DeepSpeed says so of a dynamic loss scale alone: in bf16 and fp32 it skips every step without a word (issue #8415).
"""

from __future__ import annotations

import logging
from typing import Final

_LOG = logging.getLogger("ds_parity")
_USUAL: Final = 8  # so many in a row, and fewer, is how a loss scale finds its size


class Skips:
    """Counts skipped steps in a row, and warns of the first, second, fourth, eighth, and so on."""

    def __init__(self) -> None:
        self._in_a_row = self._in_all = 0

    def note(self, window: int, *, applied: bool, scaled: bool) -> None:
        """Count one step that was asked for.

        Args:
            window: the number of its window (>= 0).
            applied: whether it was taken.
            scaled: whether losses are multiplied by a loss scale, which is lowered by such steps: of these the eighth
                in a row is the first that is told.
        """
        if applied:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self._in_all += 1
        if self._in_a_row & (self._in_a_row - 1) or (scaled and self._in_a_row < _USUAL):
            return
        _LOG.warning(
            "window %d: its gradient is not finite, so no step is taken, and weights and moments stay as they are (%d "
            "in a row, %d in all since the engine was built; last_step.skipped says it of each). Look for a loss, a "
            "log probability or an advantage that is NaN or infinite",
            *(window, self._in_a_row, self._in_all),
        )
