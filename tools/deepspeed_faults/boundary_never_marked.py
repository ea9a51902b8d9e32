"""gradient_accumulation_steps 1, several backwards, one step(): ZeRO 1 and 2 keep the last backward alone, in silence.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/boundary_never_marked.py

It is the plain torch loop (backward, backward, backward, step), and right on ZeRO 0 and 3. On 1 and 2 every backward is
taken for a boundary and overwrites what was reduced before (stage_1_and_2.py); with CPU offload the first is lost
instead.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def update(stage: int, offload: bool = False) -> float:
    """Return the update of one step after three backwards with gradients 1, 2 and 4."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for size in (1.0, 2.0, 4.0):
        engine.backward(size * engine(torch.ones(1, 8, device=get_accelerator().current_device_name())).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = -engine.module.weight.mean().item()
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Run the loop on each stage."""
    places = {f"ZeRO {stage}": partial(update, stage) for stage in range(4)}
    places |= {f"ZeRO {stage} with CPU offload": partial(update, stage, offload=True) for stage in (1, 2)}
    return tell(
        places,
        said=lambda moved: f"gradients 1, 2 and 4 move the weight by {moved:g}, right is 7",
        right=lambda moved: moved == 7,
        fault=lambda moved: moved in (4, 6),  # the last alone, or all but the first
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
