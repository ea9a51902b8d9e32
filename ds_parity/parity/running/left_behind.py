"""What ranks would leave behind: shared memory, and themselves where the process that started them was killed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ds_parity.parity.running.compiling import compiles_itself


def free_shared_memory(port: int) -> None:
    """Delete the buffers of ranks that met at a port; there may be none.

    DeepSpeed's CPU collectives leave 66 MB a rank behind, in memory (ops/csrc/cpu/comm/shm.cpp, 0.19.8).
    """
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        buffer.unlink(missing_ok=True)


def end_with_the_harness() -> None:
    """End this process, a rank, once the process that started it is gone, and so can not end it any more."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    # Not sys.stdin: a thread that holds its lock makes Python's own end fail.
    while os.read(0, 1):
        pass
    # A compile that is killed leaves a lock for which every later run waits.
    while compiles_itself():
        time.sleep(0.5)
    free_shared_memory(int(os.environ["MASTER_PORT"]))
    os._exit(1)
