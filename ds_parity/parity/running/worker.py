"""One rank of a launched set: it runs the job's calls one after another and writes down how each went.

It is started as `deepspeed --module ds_parity.parity.running.worker JOB`, and writes one line of JSON at a time to
`rank<N>.jsonl` in the job's folder.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.job_folder import written_by
from ds_parity.parity.running.left_behind import end_with_the_harness, free_shared_memory

# Seconds that threads of a loop have to end when the last call has.
_LAST_WORDS = 20


def main(path: str) -> int:
    """Run the calls of a job, and return 0; at the first call that raises, end the process with exit code 1."""
    job = json.loads(Path(path).read_text())
    sys.path[:0] = job["import_from"]
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    _make_repeatable()
    end_with_the_harness()
    deepspeed.init_distributed()
    # As engine/ranks/ending.py says, which cannot be asked: the engine refuses releases that are measured here.
    atexit.register(time.sleep, 0.1)
    says = Path(path).parent / written_by(dist.get_rank())
    with says.open("a", buffering=1) as out:
        _say_waits(out)
        for number, call in enumerate(job["calls"]):
            # A rank that were a call ahead of the first, and died there, would be taken for one that died in the call
            # before: the first rank tells how far all are.
            _meet()
            _say(out, {"started": number, "title": call["title"]})
            _settle()
            begun = time.perf_counter()
            try:
                result = resolve(call["function"])(**call["arguments"])
            except (Exception, SystemExit) as error:
                said = f"it has called sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
                _say(out, {"failed": number, "at": time.time(), "error": type(error).__name__, "message": said})
                traceback.print_exc()
                sys.stderr.flush()
                # A peer may wait in a collective for ever; leaving at once lets the launcher end it.
                os._exit(1)
            _say(out, {"finished": number, "seconds": time.perf_counter() - begun, "result": result})
    _meet()
    if dist.is_initialized():
        dist.destroy_process_group()
    # The harness does it too, unless it is ended before the launcher is.
    free_shared_memory(int(os.environ["MASTER_PORT"]))
    threading.Thread(target=_leave_threads, daemon=True).start()
    return 0


def _meet() -> None:
    # A loop may end as a script does, by destroying the group.
    if dist.is_initialized():
        dist.barrier()


def _leave_threads() -> None:
    # Python waits at its end for every thread that is no daemon, and the harness for its ranks: a logger's or a
    # prefetcher's that nobody stops would hold both until the time limit. One that writes its last may do so.
    time.sleep(_LAST_WORDS)
    left = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    print(
        f"{_LAST_WORDS} s behind the last call these threads still run: {', '.join(left)}", file=sys.stderr, flush=True
    )
    os._exit(0)


def _make_repeatable() -> None:
    # Kernels that add in a random order would make two runs of the same engine differ, and EXACT means bit for bit.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its stubs


def _settle() -> None:
    # Engines hold each other in cycles, so what the call before left is collected. What stays then stays for good: the
    # imports' 300,000 objects, and DeepSpeed's ZeRO 3 engines (0.19.8); frozen, they cost later collections nothing.
    gc.collect()
    gc.freeze()


def _say_waits(out: Any) -> None:
    # A rank that waits for another process to compile an extension is silent, and no hang (compiling.py).
    wait = FileBaton.wait

    def told(self: FileBaton) -> None:
        _say(out, {"waits_for": str(self.lock_file_path)})
        wait(self)

    FileBaton.wait = told  # type: ignore[method-assign]  # on the class, because torch makes one for each extension


def _say(out: Any, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    # The launcher puts --local_rank before or behind the job, by its version.
    sys.exit(main(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
