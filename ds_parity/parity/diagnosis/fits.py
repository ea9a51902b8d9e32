"""How a cause fits the record, and how often such a fit was right."""

from __future__ import annotations

from enum import Enum


class Fit(Enum):
    """What of the record a cause predicts: in words, and how often a cause with such a fit was right.

    Right and all of those named, in faults that no rule was written for: half 0 of `tests/hard/blind_faults`, against
    the torch reference and against the clean loop, fp32 on ZeRO 1 and 3, bf16 on ZeRO 2 (by
    `tests/hard/blind_faults/judged.py`). A fault counts once, however many of these records it was named in.
    """

    COMPUTED = ("a reference has computed the step under it, and these are the figures", 7, 7)
    SEQUENCE = ("its counts or learning rates are the predicted ones in every step", 12, 12)
    EVERY_STEP = ("it predicts the number of every step", 5, 5)
    CONSTANT = ("it predicts one number that all steps have", 0, 0)
    DIRECTION = ("the weights lie in the direction that it predicts", 11, 11)
    ALONE = ("nothing but the logged number differs, and what it would change is recorded", 12, 12)
    PATTERN = ("it predicts which steps and fields differ", 1, 1)
    HEADER = ("the headers of the traces say so", 1, 1)

    def __init__(self, words: str, right: int, named: int) -> None:
        self.words, self.right, self.named = words, right, named

    @property
    def likelihood(self) -> float:
        """In (0, 1): the share of right ones, drawn towards one half where few were seen (Laplace's rule)."""
        return (self.right + 1) / (self.named + 2)

    @property
    def measured(self) -> str:
        """How often such a fit was right, in words."""
        if not self.named:
            return "not measured: no fault of those that no rule was written for was named so"
        return f"right in {self.right} of {self.named} faults that no rule was written for"
