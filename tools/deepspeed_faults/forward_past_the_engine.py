"""ZeRO 3, and ZeRO 1 in bf16 with fp32 accumulation: backwards without an `engine(x)` between them are not added up.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/forward_past_the_engine.py

What ends a backward is done at the start of the next `engine.forward` (engine.py, forward: clear_backward_seen_flag)
or in a hook of its result (backward_prologue). A loop that calls `engine.module(x)`, or that runs two forwards and then
two backwards, is without it: ZeRO 3 copies the second gradient over the first (stage3.py, partition_grads), and
BF16_Optimizer adds the first one again (bf16_optimizer.py, clear_lp_grads). No error shows. From 0.18.4 to 0.19.5 the
losses of `engine.module(x)` are not divided by the accumulation steps either, on any stage.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

FP32_ACCUMULATION = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def moved(stage: int, loop: str, precision: dict[str, object]) -> float:
    """Return by how much two passes with gradients 1 and 2 move a weight at a learning rate of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **precision,
    }
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 4, device=get_accelerator().current_device_name(), dtype=next(model.parameters()).dtype)
    call = engine.module if loop == "engine.module" else engine
    if loop == "two forwards ahead":
        losses = [call(x).sum(), 2 * call(x).sum()]
    for factor in (1, 2):
        engine.backward(losses[factor - 1] if loop == "two forwards ahead" else factor * call(x).sum())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        moves = -engine.module.weight.float().mean().item()
    engine.destroy()
    return moves


def main() -> dict[str, str]:
    """Measure each loop on each stage."""
    cells = [*((stage, {}) for stage in range(4)), (1, FP32_ACCUMULATION)]
    places = {}
    for stage, precision in cells:
        name = f"ZeRO {stage}{' in bf16 with fp32 accumulation' if precision else ''}"
        for loop in ("engine(x)", "engine.module", "two forwards ahead"):
            places[f"{name}, {loop}"] = partial(moved, stage, loop, precision)
    return tell(
        places,
        said=lambda moves: f"moves by {moves:g}; right is 1.5",
        right=lambda moves: moves == 1.5,
        # A pass is lost, the first counts twice, or (up to 0.19.5) the loss is not divided by the passes.
        fault=lambda moves: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
