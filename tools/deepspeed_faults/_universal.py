"""What the scripts on universal checkpoints have in common: how one is made of an engine's checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal


@contextmanager
def converted(engine: Any) -> Iterator[str]:
    """Return a context with a folder of each rank's own, in which the engine's checkpoint is, and what is made of it.

    Each rank converts for itself, so that all of them know what is raised. The tags are `saved` and `universal`.
    """
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        dist.barrier()
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(f"{folders[0]}/saved", f"{copy}/saved")
            _convert(copy)
            yield copy
        dist.barrier()  # the first rank removes the folder


def _convert(folder: str) -> None:
    """Do what `ds_to_universal` does from the command line."""
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": f"{folder}/saved", "output_folder": f"{folder}/universal"}
    ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))
