"""ZeRO 3: a leaf module's gradients are lost where torch does not run its backward hook; where it is early, it raises.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/leaf_hooks.py

DeepSpeed reduces them in a full backward hook on the module (stage3.py, reduce_leaf_module_grads). torch runs it only
if the module returns a tensor or a tuple of tensors; and where none of its inputs requires a gradient (the first module
of a model, an embedding), before the gradients of its parameters are there. A gradient that is lost is not reduced, and
the step takes zeros for it. On a CPU that step ends in an error by chance, because zero_grad() calls record_stream() on
what was left, which torch has for no CPU tensor; without that call no error shows. One rank alone shows nothing.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad

WIDTH = 4


class Leaf(torch.nn.Module):
    """A weight; what it says comes in a dict or as it is."""

    def __init__(self, in_dict: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1, bias=False)
        self.in_dict = in_dict

    def forward(self, x: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return a number, alone or in a dict."""
        return {"said": self.linear(x)} if self.in_dict else self.linear(x)


class Model(torch.nn.Module):
    """What has a leaf, and needs a gradient itself."""

    def __init__(self, in_dict: bool) -> None:
        super().__init__()
        self.leaf = Leaf(in_dict)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the leaf says."""
        said = self.leaf(x)
        return said["said"] if isinstance(said, dict) else said


def gradient(in_dict: bool, requires: bool) -> list[float] | None:
    """Return the gradient of the leaf's weight on this rank: inputs are ones, losses 1 and 3 times the output."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    model = Model(in_dict)
    deepspeed.utils.set_z3_leaf_modules(model, [Leaf])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        x = torch.ones(1, WIDTH, device=get_accelerator().current_device_name(), requires_grad=requires)
        engine.backward((1 + 2 * (dist.get_rank() % 2)) * engine(x).sum())
        found = safe_get_full_grad(model.leaf.linear.weight)
        return None if found is None else found.flatten().tolist()
    finally:
        engine.destroy()


RIGHT = [2.0] * WIDTH


def main() -> dict[str, str]:
    """Measure."""
    return tell(
        {
            "ZeRO 3, a tensor": partial(gradient, in_dict=False, requires=True),
            "ZeRO 3, a dict": partial(gradient, in_dict=True, requires=True),
            "ZeRO 3, no input that requires a gradient": partial(gradient, in_dict=False, requires=False),
        },
        said=lambda found: f"the gradient is {found}; right is {RIGHT}",
        right=lambda found: found == RIGHT,
        fault=lambda found: True,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
