"""set_train_batch_size() between steps: the next step is made of the wrong number of passes.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/set_train_batch_size.py

The boundary is (micro_steps + 1) % gradient_accumulation_steps == 0 over all passes since the start
(runtime/engine.py): after a change of the second number the phase is wrong, and the losses are divided by it all the
same.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def steps(stage: int) -> list[float]:
    """Return the updates of eight passes with gradient 1: two a step at first, three a step after the first step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    at, moved = 0.0, []
    for _ in range(8):
        engine.backward(engine(torch.ones(1, 8, device=get_accelerator().current_device_name())).sum())
        before = engine.global_steps
        engine.step()
        if engine.global_steps > before:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                now = engine.module.weight.mean().item()
            moved.append(round(at - now, 3))
            at = now
        if engine.global_steps == 1 and before == 0:
            engine.set_train_batch_size(3 * deepspeed.comm.get_world_size())
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Change the batch size after a step on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(steps, stage) for stage in range(4)},
        said=lambda moved: f"updates {moved}, each a mean of gradients that are 1; right is 1.0 for all",
        right=lambda moved: set(moved) == {1.0},
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
