"""round_robin_gradients on ZeRO 1 and 2: safe_get_full_fp32_param returns another parameter's values.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/round_robin_fp32_param.py

Round robin reorders the parameters before it partitions them, the mapping behind the safe_get functions follows the old
order (stage_1_and_2.py, _link_all_hp_params). Training itself is right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param


def distance(stage: int, round_robin: bool) -> float:
    """Return how far the fp32 values lie from the weights themselves, which are fp32 too."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "round_robin_gradients": round_robin},
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 4, device=get_accelerator().current_device_name())).sum())
    engine.step()
    pairs = [(safe_get_full_fp32_param(p), p.detach()) for p in engine.module.parameters()]
    engine.destroy()
    return max((full.to(weight.device) - weight).abs().max().item() for full, weight in pairs)


def main() -> dict[str, str]:
    """Compare on both stages, without and with round robin. Needs two ranks."""
    deepspeed.init_distributed()
    return tell(
        {
            f"ZeRO {stage}{' with round_robin_gradients' if switch else ''}": partial(distance, stage, switch)
            for stage in (1, 2)
            for switch in (False, True)
        },
        said=lambda off: f"off by {off:g}, right is 0",
        right=lambda off: off == 0,
        fault=lambda off: off > 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
