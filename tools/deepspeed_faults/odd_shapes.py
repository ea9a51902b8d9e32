"""ZeRO 0 to 3: no engine over a parameter without a dimension, or whose last dimension is not contiguous.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/odd_shapes.py

The weights of the first rank are sent to the others as bytes, `p.data.view(torch.uint8)` (runtime/engine.py,
_broadcast_model; on ZeRO 3 zero/partition_parameters.py, _zero_init_param), and torch makes no such view of a number
without a dimension (a learned temperature, or scale) or of a last dimension that is not contiguous (`channels_last`, a
transposed weight).
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell


class Model(torch.nn.Module):
    """A layer whose weight lies in memory as its transpose, or with a factor of no dimension."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        if transposed:
            self.layer.weight = torch.nn.Parameter(torch.ones(4, 3).t())
        self.factor = torch.nn.Parameter(torch.ones(1) if transposed else torch.tensor(1.0))


BUILT = "an engine is built"


def build(stage: int, transposed: bool) -> str:
    """Return what comes of an engine."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Model(transposed)
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except RuntimeError as error:
        return f"initialize() raises: {error}"
    engine.destroy()
    return BUILT


def main() -> dict[str, str]:
    """Measure on ZeRO 0 to 3."""
    kinds = {"no dimension": False, "transposed": True}
    return tell(
        {f"ZeRO {stage}, {kind}": partial(build, stage, odd) for stage in range(4) for kind, odd in kinds.items()},
        said=str,
        right=lambda said: said == BUILT,
        fault=lambda said: "to view Float as Byte" in said,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
