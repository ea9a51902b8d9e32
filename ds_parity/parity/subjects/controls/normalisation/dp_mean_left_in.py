"""dp-mean-left-in: divided by the global total, and DeepSpeed's mean over ranks is not undone.

The gradient is too small by exactly the number of ranks.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class DpMeanLeftIn(Loop):
    """The engine with this fault."""

    name = "dp-mean-left-in"
    seen = "TRL #5619, VeOmni #338"

    def averaged(self) -> float:
        """Forget the mean over ranks."""
        return 1.0
