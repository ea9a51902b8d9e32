"""torch_autocast fp16: a checkpoint has no loss scale, and a run that goes on from it begins at 65536 again.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_scale_not_saved.py

DeepSpeed saves the scale of its own optimizers for fp16 (`loss_scaler`), and nothing of a GradScaler
(runtime/engine.py, runtime/zero/stage_1_and_2.py and stage3.py). A run whose scale had come down to 256 skips eight
steps behind a load until it is there again, each with the data of a whole step.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, forget_autocast, scaler_of, tell

SCALE = 256.0


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    """Return an engine of one small layer."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    forget_autocast()  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(8, 1, bias=False)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def scale_behind_a_load(stage: int) -> float:
    """Save an engine whose loss scale is 256, load the checkpoint into a new one, and return that one's scale."""
    engine = engine_of(stage)
    engine.backward(engine(torch.ones(1, 8, device=engine.device)).float().sum())
    engine.step()
    scaler_of(engine).update(SCALE)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        dist.barrier()
        other = engine_of(stage)
        other.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    found = float(scaler_of(other).get_scale())
    engine.destroy()
    other.destroy()
    forget_autocast()
    return found


def main() -> dict[str, str]:
    """Load on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(scale_behind_a_load, stage) for stage in range(4)},
        said=lambda found: f"the loss scale is {found:g} behind the load; {SCALE:g} is right",
        right=lambda found: found == SCALE,
        fault=lambda found: found == 2.0**16,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
