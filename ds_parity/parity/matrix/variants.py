"""All rows of the matrix, in the order in which they are shown."""

from __future__ import annotations

from ds_parity.parity.matrix.caller_rows import CALLER
from ds_parity.parity.matrix.deepspeed_rows import COMMUNICATION, MODEL, OPTIMIZER, SCHEDULER, STEP
from ds_parity.parity.matrix.engine_rows import AUTOTP, COMPILED, MOVED, SWAPPED
from ds_parity.parity.matrix.precision_rows import OFFLOAD, PRECISION
from ds_parity.parity.matrix.window_rows import LOSSES, RANKS, WINDOW

VARIANTS = (
    *PRECISION,
    *OFFLOAD,
    *COMMUNICATION,
    *STEP,
    *MODEL,
    *OPTIMIZER,
    *SCHEDULER,
    *WINDOW,
    *LOSSES,
    *CALLER,
    *AUTOTP,
    *MOVED,
    *COMPILED,
    *SWAPPED,
    *RANKS,
)
