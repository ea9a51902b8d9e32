"""ZeRO 3: a conversion takes files that an earlier save of more ranks has left, and cuts every weight wrongly.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/converted_with_left_over.py

A run of two ranks that saves under the tag of a run of four replaces the files of two. The conversion to a universal
checkpoint takes the number of files for that of ranks (checkpoint/ds_to_universal.py, extract_zero_shards_stage3):
weights and states are those of other places, without an error. On ZeRO 1 and 2 the conversion raises.
"""

import shutil
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.checkpoint import ds_to_universal


def built(stage: int, *, universal: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over two layers, whose weights are 0, 1, 2 and so on, or all of them 0."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1, bias=False))
    for one in model.parameters():
        values = torch.zeros(one.numel()) if universal else torch.arange(float(one.numel()))
        one.data.copy_(values.view_as(one))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def off(stage: int) -> str:
    """Return how far the greatest weight is off behind the load, or what the conversion raises."""
    engine = built(stage, universal=False)
    engine.backward(engine(torch.ones(1, 6, device=engine.device)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        folders = [shared]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        dist.barrier()
        saved = Path(own) / "saved"
        shutil.copytree(f"{folders[0]}/saved", saved)
        dist.barrier()  # the first rank removes the folder
        for file in list(saved.glob("*zero_pp_rank_1_*")):  # as a run of four ranks has left them
            for rank in (2, 3):
                shutil.copy(file, saved / file.name.replace("rank_1_", f"rank_{rank}_", 1))
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders_of = {"input_folder": str(saved), "output_folder": f"{own}/universal"}
        try:
            ds_to_universal.main(Namespace(**folders_of, **options, inject_missing_state=True))
        except RuntimeError as error:
            return f"the conversion raises {type(error).__name__}: {str(error)[:60]}"
        loaded = built(stage, universal=True)
        loaded.load_checkpoint(own, tag="universal")
    weight = loaded.module[0].weight
    with deepspeed.zero.GatheredParameters([weight] if stage == 3 else []):
        right = torch.arange(float(weight.numel()), device=weight.device).view_as(weight)
        return f"weights are off by up to {(weight.detach() - right).abs().max().item():.3g}"


def main() -> dict[str, str]:
    """Convert and load on each stage that has such files."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(off, stage) for stage in (1, 2, 3)},
        said=str,
        right=lambda said: said.startswith("the conversion raises") or said.endswith("up to 0"),
        fault=lambda said: said.startswith("weights are off") and not said.endswith("up to 0"),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
