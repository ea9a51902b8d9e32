"""A pipeline on ZeRO 1: of what the stages of a tied layer do not share, a universal checkpoint has one stage's.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/universal_of_stages.py

A tied layer is on several stages, and has there what its `tied_weight_attr` names in common. What else it has, such as
a bias, is each stage's own, but all stages call it by one name (tied_modules of runtime/pipe/module.py). The conversion
writes what has one name into one folder (checkpoint/ds_to_universal.py), where one stage's replaces the other's, with
its moments. The load raises nothing.
"""

import sys

import deepspeed
import torch
from _pipelines import two_stages
from _places import exit_code, tell
from _universal import converted
from deepspeed.pipe import LayerSpec, TiedLayerSpec


class Scale(torch.nn.Module):
    """Multiplies by a weight, and adds a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product and the bias."""
        return x * self.weight + self.bias


def built() -> deepspeed.PipelineEngine:
    """Return an engine whose first and last layer share their weight."""
    layers = [TiedLayerSpec("scale", Scale), LayerSpec(Scale), LayerSpec(Scale), TiedLayerSpec("scale", Scale)]
    for spec in (layers[0], layers[-1]):
        spec.tied_weight_attr = ["weight"]
    return two_stages(layers, universal=True)


def apart() -> float:
    """Save, convert and load; return how far this stage's own bias is from the one that it has saved."""
    engine = built()
    with torch.no_grad():
        engine.module.tied_modules["scale"].bias += 1.0 + engine.stage_id
    engine.optimizer.refresh_fp32_params()
    x = torch.ones((1, 8), device=engine.device)
    engine.train_batch(iter([(x, x)]))
    saved = engine.module.tied_modules["scale"].bias.detach().clone()
    with converted(engine) as folder:
        other = built()
        other.load_checkpoint(folder, tag="universal")
    both = (other.module.tied_modules["scale"].bias.detach() - saved).abs().max()
    # Either stage's may be the one that is kept.
    deepspeed.comm.all_reduce(both, op=deepspeed.comm.ReduceOp.MAX)
    return float(both)


def main() -> dict[str, str]:
    """Load it on both stages."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 1": apart},
        said=lambda found: f"a bias is {found:g} from the one that was saved",
        right=lambda found: found < 1e-6,
        fault=lambda found: found > 0.5,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
