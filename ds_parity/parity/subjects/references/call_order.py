"""The order in which a training function calls an engine: for each micro-batch one backward(), then one step()."""

from __future__ import annotations

from ds_parity.errors import WindowError


class CallOrder:
    """Where a training function stands with its micro-batches, which are counted from 0.

    Called in another order, references would go wrong in ways of their own, and say so by errors of Python.
    """

    def __init__(self) -> None:
        self._taken = self._ran = -1
        self._owes_step = False

    def take(self, index: int) -> None:
        """Note that a micro-batch is handed out.

        Raises:
            WindowError: the one before has had no backward().
        """
        if self._taken != self._ran:
            raise WindowError(
                "passes() was asked for the next micro-batch before the last had its backward(): all ranks count on "
                "every pass; run each micro-batch before the next is taken, and leave none out"
            )
        self._taken = index

    def run(self) -> int:
        """Return which micro-batch a backward() is of.

        Raises:
            WindowError: the pass before waits for its step(), or no micro-batch does for a backward().
        """
        if self._owes_step:
            raise WindowError(
                "backward() while the pass before it waits for its step(): one step() ends one pass; call it after "
                "every backward()"
            )
        if self._taken == self._ran:
            raise WindowError(
                "backward() without a new micro-batch: each micro-batch has one backward(); take the next one, or add "
                "up what the losses of one micro-batch are"
            )
        self._ran, self._owes_step = self._taken, True
        return self._ran

    def end(self) -> int:
        """Return which micro-batch a step() ends the pass of.

        Raises:
            WindowError: no backward() has run since the last step().
        """
        if not self._owes_step:
            raise WindowError(
                "step() without a backward() before it: one step() ends one pass; call it once after every backward()"
            )
        self._owes_step = False
        return self._ran
