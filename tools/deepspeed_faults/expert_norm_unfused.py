"""ZeRO 0 in bf16 and fp16 without a fused Adam: the norm that clips has no experts (DeepSpeed's MoE) in it.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/expert_norm_unfused.py

FP16_UnfusedOptimizer splits the gradients of experts off and takes the norm of the others alone (step of
runtime/fp16/unfused_optimizer.py). So it reports too small a norm, and clips too little; where all that trains is
experts, nothing is clipped. It does so with experts on every rank, too. FP16_Optimizer, which has the fused Adam, and
ZeRO 1 and 2 add the squares of all experts up.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from expert_norm_zero0 import WIDTH, Experts


def clipped(stage: int) -> float:
    """Return the norm of an update at rate 1 that is clipped to 1, over the experts of both ranks."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Experts()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    device = get_accelerator().current_device_name()
    x = torch.tensor([[1.0] * WIDTH, [-1.0] * WIDTH], device=device, dtype=torch.bfloat16)
    engine.backward(engine(x).float())
    engine.step()
    square = sum(weight.detach().float().pow(2).sum() for weight in trained)
    dist.all_reduce(square)
    engine.destroy()
    return float(square.sqrt())


def main() -> dict[str, str]:
    """Measure."""
    return tell(
        {f"ZeRO {stage}, in bf16": partial(clipped, stage) for stage in (0, 1, 2)},
        said=lambda norm: f"an update that is clipped to 1 has the norm {norm:.3g}",
        right=lambda norm: abs(norm - 1) < 0.01,
        fault=lambda norm: norm > 1.01,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
