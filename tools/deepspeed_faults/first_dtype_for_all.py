"""ZeRO 2 in fp32: gradients are rounded to the dtype of the optimizer's first parameter, also where that is frozen.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/first_dtype_for_all.py

`self.dtype` is that of `param_groups[0]["params"][0]` (runtime/zero/stage_1_and_2.py, `__init__`), and the gradients
that a rank keeps are of that dtype (`copy_grads_in_partition`). A frozen model in bf16 with adapters in fp32, all of
whose parameters are handed over, trains its adapters by gradients in bf16. A gradient that is not finite is let pass
then.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell


class Adapted(torch.nn.Module):
    """A frozen weight, and a trained one in fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(8, dtype=dtype), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number, whose gradient to each adapter weight is `x`."""
        return (self.adapter * self.frozen.float() * x).sum()


def moved(stage: int, dtype: torch.dtype) -> float:
    """Take one step of SGD with a rate of 1 along a gradient of a third; return how far a weight has moved."""
    model = Adapted(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.tensor(1 / 3, device=engine.device)))
    engine.step()
    with deepspeed.zero.GatheredParameters([model.adapter], enabled=stage == 3):
        return -float(model.adapter[0])


def main() -> dict[str, str]:
    """Take the step on each stage, beside frozen weights of each dtype."""
    deepspeed.init_distributed()
    beside = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return tell(
        {
            f"ZeRO {stage}, beside a frozen {name} weight": partial(moved, stage, dtype)
            for stage in (1, 2, 3)
            for name, dtype in beside.items()
        },
        said=lambda found: f"the weight moves by {found:.6f}; its gradient is 0.333333",
        right=lambda found: abs(found - 1 / 3) < 1e-6,
        fault=lambda found: abs(found - 1 / 3) < 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
