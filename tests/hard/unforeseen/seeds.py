"""Plays what seeds say, one after the other in ranks that are started once."""

import contextlib
import faulthandler
import gc
import os
import shutil
import tempfile
import warnings

import torch.distributed as dist


def batches(variable, usual, size):
    """Seeds by start of ranks.

    Args:
        variable: of the environment, which may name more of them than the suite plays: `1000:1100`.
        usual: those of the suite, written likewise.
        size: of a batch; engines of ZeRO 3 stay in memory for good.
    """
    first, last = map(int, os.environ.get(variable, usual).split(":"))
    return [range(at, min(last, at + size)) for at in range(first, last, size)]


def played(seeds, play, seconds):
    """What was wrong by seed: what `play(seed)` returns, where it returns something.

    A rank ends by itself, and says where it was, if a seed takes more than so many seconds.
    """
    warnings.filterwarnings("ignore")
    found = {}
    for seed in seeds:
        faulthandler.dump_traceback_later(seconds, exit=True)
        if said := play(seed):
            found[seed] = said
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    return found


@contextlib.contextmanager
def shared_folder():
    """A folder for all ranks; it stays where one of them raises, because others may be elsewhere."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()  # others may still read there
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
