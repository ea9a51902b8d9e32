"""ZeRO 1 in bf16 with fp32 accumulation: each rank clips by the norm of the parameters that its own passes used.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/norm_of_own_parameters.py

The gradients of all parameters are reduced, but the norm leaves out what a rank's own passes have not used
(bf16_optimizer.py, get_grads_for_norm and fp32_groups_has_gradients): where ranks use different parameters the norm is
too small, the update too large, and other on each rank. One rank alone shows nothing.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


class Adapters(torch.nn.Module):
    """Two weights, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Use the first (0) or the second (1)."""
        return (self.first, self.second)[number](x).sum()


def clipped(stage: int) -> float:
    """Return the norm of an update at rate 1 that is clipped to 1: rank 0 trains the first weight, rank 1 the other."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    model = Adapters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.ones(1, 4, device=get_accelerator().current_device_name(), dtype=torch.bfloat16)
    engine.backward(10 * engine(x, dist.get_rank() % 2))
    engine.step()
    weights = torch.cat([weight.detach().float().flatten() for weight in engine.module.parameters()])
    engine.destroy()
    return float(weights.norm())


def main() -> dict[str, str]:
    """Measure."""
    return tell(
        {"ZeRO 1 in bf16 with fp32 accumulation": partial(clipped, 1)},
        said=lambda norm: f"an update that is clipped to 1 has the norm {norm:.3g}",
        right=lambda norm: abs(norm - 1) < 0.02,  # bf16 has 8 bits
        fault=lambda norm: norm > 1.02,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
