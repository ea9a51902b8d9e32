"""AutoTP: a layer that has more than a weight and a bias loses it without a word: an adapter, its forward, hooks.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/autotp_loses_adapters.py

DeepSpeed puts a layer of its own in the place of each that it divides, with the weight and the bias of that one
(module_inject/auto_tp.py, _replace and _replace_with_config). The model of the engine is another function then. Where
a parameter that is gone is trained, ZeRO 1 to 3 raise a KeyError or an AttributeError.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell

PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ],
}


class Adapted(torch.nn.Linear):
    """A layer of zeros beside an adapter, which gives ones."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, bias=False)
        self.adapter = torch.nn.Parameter(torch.full_like(self.weight, 0.25), requires_grad=False)
        self.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both give."""
        return super().forward(x) + torch.nn.functional.linear(x, self.adapter)


class Model(torch.nn.Module):
    """Two layers that AutoTP divides, the first one with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(4, 8), torch.nn.Linear(8, 1, bias=False)
        self.down.weight.data.fill_(0.125)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each row."""
        return self.down(self.up(x))


def given(stage: int) -> float:
    """Return what the engine's model gives for ones."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, "partition_config": PLAN},
    }
    model = Model()
    trained = [one for one in model.parameters() if one.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    with torch.no_grad():
        return engine(torch.ones(1, 4, device=engine.device)).item()


def main() -> dict[str, str]:
    """Build an engine on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(given, stage) for stage in range(4)},
        said=lambda value: f"the engine's model gives {value:g}, and the model gave 1",
        right=lambda value: value == 1,
        fault=lambda value: value == 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
