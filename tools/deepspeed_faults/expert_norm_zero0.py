"""ZeRO 0 in fp32, experts on different ranks (`ep_size` above 1): clips by the mean of the ranks' norms.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/expert_norm_zero0.py

A rank has the gradients of its own experts alone, and takes their norm for that of the whole gradient; the norm that
clips is the mean of what the ranks have (runtime/utils.py, clip_grad_norm_). It is too small, and the update too large.
FP16_Optimizer and ZeRO 1 and 2 add the squares of all experts up. One rank alone shows nothing.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

WIDTH = 4


class Experts(torch.nn.Module):
    """Nothing but experts, one on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        options = {"k": 1, "drop_tokens": False, "min_capacity": 0, "use_rts": False}
        expert = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.moe = MoE(WIDTH, expert, num_experts=2, ep_size=2, **options)
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()
            # Positive rows enter the first expert and negative ones the second, by a gate that does not train.
            gate = self.moe.deepspeed_moe.gate.wg.weight
            gate[0], gate[1] = 1.0, -1.0
            gate.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 10 times the sum of what the experts say."""
        return 10 * self.moe(x)[0].sum()


def clipped(stage: int) -> float:
    """Return the norm of an update at rate 1 that is clipped to 1, over the experts of both ranks."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Experts()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x = torch.tensor([[1.0] * WIDTH, [-1.0] * WIDTH], device=get_accelerator().current_device_name())
    engine.backward(engine(x))
    engine.step()
    square = sum(weight.detach().pow(2).sum() for weight in trained)
    dist.all_reduce(square)
    engine.destroy()
    return float(square.sqrt())


def main() -> dict[str, str]:
    """Measure."""
    return tell(
        {f"ZeRO {stage}": partial(clipped, stage) for stage in (0, 1, 2)},
        said=lambda norm: f"an update that is clipped to 1 has the norm {norm:.3g}",
        right=lambda norm: abs(norm - 1) < 0.001,
        fault=lambda norm: norm > 1.001,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
