"""torch_autocast fp16 on ZeRO 0: a step that the GradScaler skips is counted as taken, and the LR moves.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_zero0_skip.py

The engine counts a step as skipped where `optimizer.overflow` says so (runtime/engine.py, _take_model_step), and a
torch optimizer has no such attribute: `was_step_applied()` is True, `skipped_steps` 0, the scheduler goes on.
"""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "torch_autocast": {"enabled": True, "dtype": "float16"},
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 10, "warmup_max_lr": 1.0, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 0},
}


def main() -> bool:
    """Take one step that overflows; return whether it was counted as taken."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    before = engine.lr_scheduler.last_batch_iteration
    one = torch.ones(1, 1, device=get_accelerator().current_device_name())
    engine.backward(2.0 * engine(one).float().sum())  # 2 * 65536 is more than fp16 holds
    engine.step()
    moved = engine.lr_scheduler.last_batch_iteration - before
    weight, applied, skipped = engine.module.weight.item(), engine.was_step_applied(), engine.skipped_steps
    engine.destroy()
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    print(f"the weight is {weight:g}, as it was: nothing was applied; right is False, 1 skipped, 0 scheduler steps")
    print(f"was_step_applied() {applied}, skipped_steps {skipped}, scheduler steps {moved}")
    fault = weight == 0 and bool(applied) and moved == 1
    print("FAULT" if fault else "fixed in this version")
    return fault


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
