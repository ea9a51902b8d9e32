"""ZeRO 1 with overlap_comm: engine.allreduce_gradients() after the backwards reduces nothing.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/allreduce_zero1_overlap.py

With overlap_comm the reduction is left to hooks of the boundary's backward (stage_1_and_2.py, reduce_gradients), so a
window that ends without one (the data ran out) can't be settled by the public call, as it can without overlap_comm.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def update(overlap: bool) -> str:
    """Return what moves after a backward inside a window, the public reduction and a step; rank r has gradient 2r."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "overlap_comm": overlap},
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    size = 2.0 * deepspeed.comm.get_rank()
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(size * engine(torch.ones(1, 8, device=get_accelerator().current_device_name())).sum())
    engine.set_gradient_accumulation_boundary(True)
    engine.allreduce_gradients()
    try:
        engine.step()
        moved = ", ".join(f"{-value:g}" for value in engine.module.weight[0, [0, -1]].tolist())
    except (KeyError, TypeError, RuntimeError) as error:
        moved = f"{type(error).__name__}: {error}"
    engine.destroy()
    return moved


def main() -> dict[str, str]:
    """Settle a window without and with overlap_comm. Needs two ranks or more."""
    deepspeed.init_distributed()
    mean = deepspeed.comm.get_world_size() - 1
    places = {"ZeRO 1": partial(update, False), "ZeRO 1 with overlap_comm": partial(update, True)}
    return tell(
        places,
        said=lambda moved: f"the weights of both ends move by {moved}; right is {mean}, {mean}",
        right=lambda moved: moved == f"{mean}, {mean}",
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
