"""ZeRO 3: an engine does not run over a model that another engine trains, too, unless it fetches nothing ahead.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/engines_of_one_model.py

Both engines hang hooks on the shared modules, so that each fetches weights whichever of them runs. A weight that the
first one has begun to fetch ahead is unknown to the second one, which waits for nothing and asserts that it is there
(zero/partitioned_param_coordinator.py, fetch_sub_module). With `stage3_prefetch_bucket_size` 0 both are right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator

RIGHT = "all steps are taken"


class Headed(torch.nn.Module):
    """A head of its own on the shared layer, which one of two such models trains."""

    def __init__(self, shared: torch.nn.Module, trains: bool) -> None:
        super().__init__()
        self.shared, self.head, self.trains = shared, torch.nn.Linear(8, 1), trains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        with torch.set_grad_enabled(self.trains):
            x = self.shared(x)
        return self.head(x).sum()


def steps(stage: int, ahead: dict[str, int]) -> str:
    """Return what comes of three steps of each of two engines in turn."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        # Weights as small as these would else be fetched once, and kept.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | ahead,
    }
    shared, engines = torch.nn.Linear(8, 8), []
    for trains in (True, False):
        model = Headed(shared, trains)
        trained = [*model.head.parameters(), *(shared.parameters() if trains else ())]
        engines.append(deepspeed.initialize(model=model, model_parameters=trained, config=config)[0])
    ones = torch.ones(1, 8, device=get_accelerator().current_device_name())
    try:
        for _ in range(3):
            for engine in engines:
                engine.backward(engine(ones))
                engine.step()
    except AssertionError as error:
        return f"a forward raises: {error}"
    finally:
        for engine in engines:
            engine.destroy()
    return RIGHT


def main() -> dict[str, str]:
    """Step on ZeRO 2 and 3."""
    none = {"stage3_prefetch_bucket_size": 0}
    return tell(
        {
            "ZeRO 2": partial(steps, 2, {}),
            "ZeRO 3": partial(steps, 3, {}),
            "ZeRO 3, stage3_prefetch_bucket_size 0": partial(steps, 3, none),
        },
        said=str,
        right=lambda said: said == RIGHT,
        fault=lambda said: "INFLIGHT" in said,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
