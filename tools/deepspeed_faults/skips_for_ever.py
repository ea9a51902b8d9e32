"""ZeRO 1 and 2 with CPU offload and fp32 accumulation: behind one step that is skipped, every other one is skipped.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/skips_for_ever.py

Sums in fp32 are in a buffer of their own (runtime/zero/stage_1_and_2.py, _build_compact_grad_partition_buffer, 0.19.8).
A step that is skipped, because a gradient is not finite, clears it without offload alone. So the sums stay infinite,
and the weights as they are. Nothing is raised.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import NotThere, allow_fp16, exit_code, tell

HALF = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


def skipped(stage: int, half: str) -> int:
    """Return how many of five steps are skipped, the second of which has a gradient that is infinite on one rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "data_types": {"grad_accum_dtype": "fp32"},
        **HALF[half],
    }
    try:
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    except (NotImplementedError, AssertionError) as error:
        raise NotThere(f"no engine is built: {error}") from None
    x = torch.ones(2, 4, dtype=engine.module.weight.dtype, device=engine.device)
    for step in range(5):
        factor = torch.inf if step == 1 and dist.get_rank() == 0 else 1.0
        hook = engine.module.weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        hook.remove()
    return engine.skipped_steps


def main() -> dict[str, str]:
    """Count in both precisions on both stages."""
    deepspeed.init_distributed()
    allow_fp16()
    return tell(
        {
            f"ZeRO {stage} in {half}, with {sums}CPU offload": partial(skipped, stage, half)
            for half, sums in (("bf16", "fp32 accumulation and "), ("fp16", ""))
            for stage in (1, 2)
        },
        said=lambda value: f"{value} of 5 steps are skipped, where one gradient is infinite",
        right=lambda value: value == 1,
        fault=lambda value: value == 4,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
