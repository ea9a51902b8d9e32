"""torch_autocast fp16 on ZeRO 0: a step that the GradScaler skips is counted as taken, and the LR moves.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/autocast_fp16_zero0_skip.py

The engine counts a step as skipped where `optimizer.overflow` says so (runtime/engine.py, _take_model_step), and a
torch optimizer has no such attribute: `was_step_applied()` is True, `skipped_steps` 0, the scheduler goes on.
"""

import sys

import deepspeed
import torch
from _places import exit_code, forget_autocast, scaler_of, tell
from deepspeed.accelerator import get_accelerator

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


def skipped_step() -> tuple[float, bool, int, int]:
    """Return the weight after a step that overflows, whether it was applied, and the skipped and scheduler's steps."""
    forget_autocast()  # see autocast_outlives_its_engine.py
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    scaler_of(engine)
    before = engine.lr_scheduler.last_batch_iteration
    one = torch.ones(1, 1, device=get_accelerator().current_device_name())
    engine.backward(2.0 * engine(one).float().sum())  # 2 * 65536 is more than fp16 holds
    engine.step()
    moved = engine.lr_scheduler.last_batch_iteration - before
    weight, applied, skipped = engine.module.weight.item(), engine.was_step_applied(), engine.skipped_steps
    engine.destroy()
    forget_autocast()
    return weight, bool(applied), skipped, moved


def main() -> dict[str, str]:
    """Take one step that overflows."""
    return tell(
        {"ZeRO 0": skipped_step},
        said=lambda found: (
            "weight {:g}, was_step_applied() {}, skipped_steps {}, scheduler steps {}; right is 0 as before, "
            "False, 1 and 0".format(*found)
        ),
        right=lambda found: found == (0, False, 1, 0),
        fault=lambda found: found[0] == 0 and found[1] and found[3] == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
