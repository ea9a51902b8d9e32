"""All rows of the matrix, in the order in which they are shown."""

from __future__ import annotations

from ds_parity.parity.matrix.caller_rows import CALLER
from ds_parity.parity.matrix.deepspeed_rows import COMMUNICATION, MODEL, OPTIMIZER, SCHEDULER, STEP
from ds_parity.parity.matrix.engine_rows import AUTOTP, COMPILED, MOVED, SWAPPED
from ds_parity.parity.matrix.loop_rows import LOOPS
from ds_parity.parity.matrix.model_rows import MODELS
from ds_parity.parity.matrix.precision_rows import OFFLOAD, PRECISION
from ds_parity.parity.matrix.window_rows import LOSSES, RANKS, WINDOW

VARIANTS = (
    *PRECISION,
    *OFFLOAD,
    *COMMUNICATION,
    *STEP,
    *MODEL,
    *MODELS,
    *OPTIMIZER,
    *SCHEDULER,
    *WINDOW,
    *LOSSES,
    *CALLER,
    *LOOPS,
    *AUTOTP,
    *MOVED,
    *COMPILED,
    *SWAPPED,
    *RANKS,
)
