"""ZeRO 1 and 2: a checkpoint replaces the configuration's gradient_clipping by that of the run that saved it.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/clips_as_saved.py

The wrappers save the norm by which they clip, and load it (_load_global_state of runtime/zero/stage_1_and_2.py; also
load_state_dict of runtime/fp16/fused_optimizer.py, for fused optimizers in fp16 on ZeRO 0, and of
runtime/bf16_optimizer.py, for bf16 with fp32 accumulation). No message says so.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import allow_fp16, exit_code, tell


def built(stage: int, precision: str, limit: float) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of 0 that clips gradients to a norm."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": limit,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 1.0
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def moved(stage: int, precision: str) -> float:
    """Return how far a step at a rate of 1 goes that is clipped to 0.5, from a checkpoint of a run clipped to 2."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(stage, precision, 2.0).save_checkpoint(folders[0], tag="saved")
        engine = built(stage, precision, 0.5)
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    engine.backward(engine(torch.ones(1, 4, dtype=dtype, device=engine.device)).sum() * 8)
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.float().norm().item()


def main() -> dict[str, str]:
    """Load and step on each stage and in each precision."""
    deepspeed.init_distributed()
    allow_fp16()
    cells = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")]
    return tell(
        {f"ZeRO {stage} in {precision}": partial(moved, stage, precision) for stage, precision in cells},
        said=lambda value: f"the step is {value:.3f} long; right is 0.5",
        right=lambda value: abs(value - 0.5) < 0.01,
        fault=lambda value: abs(value - 2.0) < 0.01,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
