"""gradient_predivide_factor on ZeRO 3: where it equals the number of ranks, the gradient is divided by it twice.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/predivide_zero3.py

`__avg_scatter_contiguous_grads` (stage3.py) divides by the factor and by the number of ranks, and multiplies by the
factor again only where it is not the number of ranks. That condition belongs to ZeRO 0 to 2, which multiply by factor /
ranks. (With reduce_scatter on, ZeRO 3 refuses the key.)
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def update(stage: int, factor: float) -> float:
    """Return the update of one step on a gradient that is 1 on every rank."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_predivide_factor": factor,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 8, device=get_accelerator().current_device_name())).sum())
    engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moved = -engine.module.weight.mean().item()
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Take a step on each stage. Needs two ranks or more."""
    deepspeed.init_distributed()
    ranks = deepspeed.comm.get_world_size()
    return tell(
        {
            f"ZeRO {stage}, factor {name}": partial(update, stage, factor)
            for stage in range(4)
            for name, factor in (("1", 1.0), ("ranks", float(ranks)), ("2 ranks", 2.0 * ranks))
        },
        said=lambda moved: f"the update is {moved:g} on {ranks} ranks, right is 1",
        right=lambda moved: moved == 1,
        fault=lambda moved: moved == 1 / ranks,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
