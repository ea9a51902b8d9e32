"""What the ranks of test_launch.py do."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist


def echo(value, seconds=0.0):
    time.sleep(seconds)
    return value


def fail(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"7 is not what rank {rank} wanted")
    dist.barrier()


def die(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def late(rank):
    if dist.get_rank() == rank:
        time.sleep(2)
    return "here"


def destroy():
    dist.destroy_process_group()
    return "destroyed"


def leave(way):
    {"sys.exit": sys.exit, "os._exit": os._exit}[way](0)


def leave_threads(into):
    """As a logger's that nobody stops, a writer's, and a pool's: Python would wait for the first at its end."""

    late = Path(into, f"late{dist.get_rank()}")

    def write():
        time.sleep(1)
        late.touch()

    threading.Thread(target=time.sleep, args=(600,)).start()
    threading.Thread(target=write).start()
    ThreadPoolExecutor(1).submit(int).result()
    return "left"


def hang():
    time.sleep(600)


def answer():
    return {"rank": dist.get_rank()}
