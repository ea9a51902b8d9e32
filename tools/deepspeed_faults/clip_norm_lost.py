"""fp32 on ZeRO 0: the gradient norm is computed for clipping, and thrown away; get_global_grad_norm() is None.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/clip_norm_lost.py

`clip_fp32_gradients` drops what `clip_grad_norm_` returns (runtime/engine.py). Every other stage and type reports it.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def norm(stage: int) -> object:
    """Return what get_global_grad_norm() says after a step on a gradient of norm 2."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(64, 1, bias=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(0.25 * engine(torch.ones(1, 64, device=get_accelerator().current_device_name())).sum())
    engine.step()
    value = engine.get_global_grad_norm()
    engine.destroy()
    return value if value is None else float(value)


def main() -> dict[str, str]:
    """Take a step on each stage."""
    return tell(
        {f"ZeRO {stage}": partial(norm, stage) for stage in range(4)},
        said=lambda known: f"get_global_grad_norm() is {known}, right is 2.0",
        right=lambda known: known is not None and abs(known - 2) < 1e-4,
        fault=lambda known: known is None,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
