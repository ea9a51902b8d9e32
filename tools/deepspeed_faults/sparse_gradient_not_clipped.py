"""ZeRO 0 in fp32: clipping leaves the gradient of `torch.nn.Embedding(sparse=True)` as it is.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/sparse_gradient_not_clipped.py

`clip_grad_norm_` multiplies `p.grad.data` in place (runtime/utils.py). Of a sparse tensor that is a copy, whose product
is thrown away. The norm is right, so dense gradients beside it are clipped by it.
"""

import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

LIMIT = 0.5


def moved(sparse: bool) -> float:
    """Return how far a step moves a weight whose gradient is 2, by a learning rate of 1, clipped to LIMIT."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": LIMIT,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    }
    model = torch.nn.Embedding(4, 1, sparse=sparse)
    before = model.weight[1].item()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.tensor([1, 1], device=get_accelerator().current_device_name())).sum())
    engine.step()
    after = engine.module.weight[1].item()
    engine.destroy()
    return before - after


def main() -> bool:
    """Step by a dense and by a sparse gradient; return whether the sparse one alone is not clipped."""
    dense, sparse = moved(sparse=False), moved(sparse=True)
    print(f"a gradient of 2, clipped to {LIMIT}: dense moves the weight by {dense:.6f}, sparse by {sparse:.6f}")
    fault = abs(dense - LIMIT) < 1e-5 and abs(sparse - 2) < 1e-5
    print("FAULT" if fault else "fixed in this version")
    return fault


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
