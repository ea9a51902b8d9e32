"""A training script as it is, with the rollouts that every pass is handed written down: a file a rank."""

import json
import os
import runpy
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from ds_parity import ParityEngine
from ds_parity.parity.data.model import build_tiny

passes = ParityEngine.passes


def noted(self, stream, **options):
    path = Path(os.environ["NOTED_TO"]) / f"rank{dist.get_rank()}.jsonl"
    for micro_batch in passes(self, stream, **options):
        names = [name(unit) for unit in micro_batch.held]
        with path.open("a") as file:
            line = {"attempt": int(os.environ["NOTED_ATTEMPT"]), "window": self.window.index, "held": names}
            file.write(json.dumps(line) + "\n")
        yield micro_batch


def name(unit):
    """The same for the same tokens."""
    return f"{unit.prompt_id}/{zlib.crc32(repr([row.tokens for row in unit.sequences]).encode()):x}"


def build(seed):
    """A small decoder with dropout, which draws from the rank's generator."""
    model = build_tiny(seed)
    model.embedding.register_forward_hook(
        lambda module, _, hidden: torch.nn.functional.dropout(hidden, 0.1, training=module.training)
    )
    return model


def main():
    ParityEngine.passes = noted
    script = os.environ["NOTED_SCRIPT"]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def rank(environment, arguments, folder):
    """The same in a process that was forked: what the launcher would have set, and the log."""
    os.environ.update(environment)
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    sys.argv[1:] = arguments
    main()


if __name__ == "__main__":
    main()
