"""ZeRO 0 in fp32: clipping leaves the gradient of `torch.nn.Embedding(sparse=True)` as it is.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/sparse_gradient_not_clipped.py

`clip_grad_norm_` multiplies `p.grad.data` in place (runtime/utils.py). Of a sparse tensor that is a copy, whose product
is thrown away. The norm is right, so dense gradients beside it are clipped by it.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
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


def main() -> dict[str, str]:
    """Step by a dense and by a sparse gradient."""
    return tell(
        {"ZeRO 0, a dense gradient": partial(moved, False), "ZeRO 0, a sparse gradient": partial(moved, True)},
        said=lambda moves: f"a gradient of 2, clipped to {LIMIT}, moves the weight by {moves:.6f}",
        right=lambda moves: abs(moves - LIMIT) < 1e-5,
        fault=lambda moves: abs(moves - 2) < 1e-5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
