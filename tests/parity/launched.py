"""What the ranks of test_launch.py do."""

import os
import signal
import sys
import threading
import time

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


def leave(way):
    {"sys.exit": sys.exit, "os._exit": os._exit}[way](0)


def leave_a_thread():
    """As a logger's or a prefetcher's that nobody stops: Python would wait for it at its end."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "left"


def hang():
    time.sleep(600)


def answer():
    return {"rank": dist.get_rank()}
