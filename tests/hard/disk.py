"""What forked ranks do while the disk fills up under their trace. Held in test_disk.py."""

import io
import logging
from contextlib import suppress
from pathlib import Path

from tests.distributed.cells import config
from tests.distributed.engines import build, one_pass


def fill(rank, folder, windows):
    """Train for some windows, then with a full disk, then with space again, `windows` each.

    Returns:
        What was said, and the optimizer steps taken.
    """
    said, filler = io.StringIO(), Path(folder) / "filler"
    logging.getLogger("ds_parity").addHandler(logging.StreamHandler(said))
    engine = build(config(2, passes=4, trace=f"{folder}/trace.jsonl"))
    for number in range(6 * windows):  # a window has 2 passes
        if rank == 0 and number == 2 * windows:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if rank == 0 and number == 4 * windows:
            filler.unlink()
        one_pass(engine, number)
    return [said.getvalue(), engine.global_steps]
