"""ZeRO 0: backward(loss, scale_wrt_gas=False) divides by gradient_accumulation_steps all the same.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/divided_twice_zero0.py

It does so where the loss is the very tensor that the module has returned. `forward` puts a hook on that tensor, which
divides unless the graph is known as one of `engine.backward`; `backward` makes it known by a hook on the same tensor,
which runs behind the first one (_backward_prologue_per_tensor and backward of runtime/engine.py, 0.19.8). From stage 1
on the optimizer scales the loss, so that backward's hook is on another tensor, which comes first. No message says so.
transformers' Trainer passes such losses with `average_tokens_across_devices=False`.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import allow_fp16, exit_code, tell


class Loss(torch.nn.Module):
    """A model that returns its loss, whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """Return the weight times a factor."""
        return (self.weight * factor).sum()


def moved(stage: int, precision: str) -> float:
    """Return how far two passes of a window go at a rate of 1, each of which has a gradient of 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["loss_scale"] = 1.0
    model = Loss()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for _ in range(2):
        engine.backward(engine(torch.ones(1, dtype=dtype, device=engine.device)), scale_wrt_gas=False)
        engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return -engine.module.weight.float().item()


def main() -> dict[str, str]:
    """Step on each stage and in each precision."""
    deepspeed.init_distributed()
    allow_fp16()
    cells = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
    return tell(
        {f"ZeRO {stage} in {precision}": partial(moved, stage, precision) for stage, precision in cells},
        said=lambda value: f"the step is {value:.3f} long; right is 2",
        right=lambda value: abs(value - 2.0) < 0.01,
        fault=lambda value: abs(value - 1.0) < 0.01,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
