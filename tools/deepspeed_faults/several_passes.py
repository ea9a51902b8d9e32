"""DeepSpeed's own accumulation over four passes a step, in the plainest loop: is each step the mean of its passes?

    deepspeed --num_accelerators 2 tools/deepspeed_faults/several_passes.py

It is in the newest version. In older ones ZeRO 2 (DeepSpeed #7718), CPU offload on ZeRO 1 and 2 (#7967), bf16 with fp32
accumulation on ZeRO 1 (#7985) and bf16 on ZeRO 0 (#7839) were each wrong for a time. The last one has two causes. In
0.17.6 gradients are not cleared after a step, so that the next one contains them again. In 0.18.4 the step divides by a
loss scale of 65536, by which no loss was multiplied; bf16 with fp32 accumulation on ZeRO 1 gets the same optimizer
there, because BFLOAT16 and DDP_BFLOAT16 have one value (runtime/constants.py).
"""

import itertools
import sys
from functools import partial

import deepspeed
import torch
from _places import allow_fp16, exit_code, tell
from deepspeed.accelerator import get_accelerator

# Of the gradients, four a step, times 1 on the first rank and 3 on the second; bf16 holds all sums and means.
SIZES = (1.0, 3.0, 5.0, 7.0, 2.0, 4.0, 8.0, 10.0)
PRECISIONS = {
    "": {},
    " in bf16": {"bf16": {"enabled": True}},
    " in bf16 with fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    " in fp16": {"fp16": {"enabled": True, "loss_scale": 16}},
}


def moves(stage: int, offload: bool, precision: str) -> list[float]:
    """Return how far the first and the last element of a weight move, in the first step and then in the second."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
        **PRECISIONS[precision],
    }
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 8, device=get_accelerator().current_device_name(), dtype=next(model.parameters()).dtype)
    places = [[0.0, 0.0]]
    for number, size in enumerate(SIZES):
        engine.backward(size * (1 + 2 * deepspeed.comm.get_rank()) * engine(x).sum())
        engine.step()
        if number % 4 == 3:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                places.append((-engine.module.weight.detach().float()[0, [0, -1]]).tolist())
    engine.destroy()
    return [after[end] - before[end] for before, after in itertools.pairwise(places) for end in (0, 1)]


def main() -> dict[str, str]:
    """Take two steps in each configuration."""
    allow_fp16()
    deepspeed.init_distributed()
    ranks = deepspeed.comm.get_world_size()
    right = [ranks * mean for mean in (4.0, 4.0, 6.0, 6.0)]  # 1 + 2 * rank is as many as the ranks, in the mean
    cells = [(stage, offload, "") for stage in range(4) for offload in (False, True)[: 1 + (stage > 0)]]
    cells += [(stage, offload, " in bf16") for stage, offload, _ in cells]
    cells += [(stage, False, " in fp16") for stage in (1, 2, 3)]  # ZeRO 0: fp16_zero0_unscaled_loss.py
    cells += [(1, False, " in bf16 with fp32 accumulation")]
    return tell(
        {
            f"ZeRO {stage}{precision}{' with CPU offload' if offload else ''}": partial(
                moves, stage, offload, precision
            )
            for stage, offload, precision in cells
        },
        said=lambda moved: f"both ends of the weight move by {moved} in two steps; right is {right}",
        right=lambda moved: moved == right,
        fault=lambda moved: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
