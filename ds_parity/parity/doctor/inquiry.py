"""What only a process with torch and DeepSpeed in it can say; started as `python inquiry.py WHAT ...`, by its path.

It prints one line of JSON that begins with `doctor:`. It imports nothing of ds_parity, so that it runs beside any
DeepSpeed.
"""

import json
import os
import sys
import threading
from datetime import timedelta


def say(**facts: object) -> None:
    """Print what was found out."""
    print("doctor:" + json.dumps(facts), flush=True)


def end_with_the_doctor(compiles: bool) -> None:
    """End this process once the one that has started it is gone, and its end of standard input with it.

    Args:
        compiles: a compiler may run, and leaves a lock behind that every later run waits for if it is ended.
    """

    def wait_and_end() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    if not compiles:
        threading.Thread(target=wait_and_end, daemon=True).start()


def installed() -> None:
    """Say what DeepSpeed takes for the accelerator, and which backend it talks over."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    say(
        torch=torch.__version__,
        deepspeed=deepspeed.__version__,
        accelerator=accelerator.device_name(),
        devices=accelerator.device_count() if accelerator.is_available() else 0,
        backend=accelerator.communication_backend_name(),
    )


def talk(rank: int, ranks: int, port: int, backend: str, seconds: float) -> None:
    """Sum a number over ranks, on the host over gloo, or on the accelerator over its own backend."""
    import torch
    import torch.distributed as dist

    store = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=seconds)
    if backend != "gloo":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=limit)
    device = "cpu" if backend == "gloo" else torch.accelerator.current_accelerator()
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number)
    say(rank=rank, total=number.item())
    dist.destroy_process_group()


def reason(message: str) -> str:
    """Return the line of a compiler's output that says what is wrong; the first where none does."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    return next((line for line in lines if "not found" in line or "error:" in line), lines[0])[:300]


def build(names: list[str]) -> None:
    """Compile operators, by the names of their builders."""
    from deepspeed.accelerator import get_accelerator

    for name in names:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=False):
            say(operator=name, built=False, why="this accelerator, or this machine, can't build it")
            continue
        try:
            builder.load(verbose=False)
        except Exception as error:
            say(operator=name, built=False, why=f"{type(error).__name__}: {reason(str(error))}")
        else:
            say(operator=name, built=True)


if __name__ == "__main__":
    # The folder of this file would hide packages behind modules of the same name.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != os.path.dirname(__file__)]  # noqa: PTH100, PTH120  # before anything is imported
    what, *arguments = sys.argv[1:]
    end_with_the_doctor(compiles=what != "talk")
    if what == "installed":
        installed()
    elif what == "talk":
        rank, ranks, port = map(int, arguments[:3])
        talk(rank, ranks, port, arguments[3], float(arguments[4]))
    else:
        build(arguments)
