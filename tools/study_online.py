"""What a fault costs in reward: train_online.py with several seeds, right and with known faults, in one start.

    deepspeed --num_accelerators 2 tools/study_online.py --output study
    python tools/draw_online.py --gather study

Runs that are there already are left as they are, so that a study that was ended goes on. All faults of a seed begin
with the same weights.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import deepspeed
import torch.distributed as dist
import train_online
from trainer import launch


def more(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the study to those of a run."""
    train_online.more(parser)
    parser.add_argument("--seeds", type=int, default=5, help="from 0 on (%(default)s)")
    parser.set_defaults(output=Path("study"), steps=300, save_every=10**6)


def main(args: argparse.Namespace) -> None:
    """Run what is missing, a seed after the other."""
    deepspeed.init_distributed()
    for seed in range(args.seeds):
        for fault in train_online.FAULTS:
            output = args.output / f"{fault}-{seed}"
            done = (output / "done").exists()
            dist.barrier()
            if done:
                continue
            if dist.get_rank() == 0:
                shutil.rmtree(output, ignore_errors=True)
                output.mkdir(parents=True)
                begun = args.output / f"none-{seed}" / "start.pt"
                if begun.exists():
                    shutil.copy(begun, output / "start.pt")
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"seed {seed}, {fault}", flush=True)
            own = {"output": output, "seed": seed, "fault": fault}
            engine = train_online.main(argparse.Namespace(**{**vars(args), **own})).engine
            if engine.stopping:
                return
            engine.destroy()
            (output / "done").touch()
            dist.barrier()


if __name__ == "__main__":
    launch(main, __doc__, more)
