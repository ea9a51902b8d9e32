"""ZeRO 0 to 3: a checkpoint of two weights is loaded into a model that ties them, without an error.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/tied_since_saved.py

A head of its own, which is frozen, has the optimizer's groups of a head that is tied to the embedding. So the states of
the embedding are loaded, and torch writes both weights into the one, the head's last (runtime/engine.py,
load_module_state_dict). On ZeRO 0 the states of one weight then step the other. On ZeRO 1 and 2 the passes of the first
step use the head, and the step goes on from the embedding's fp32 weights. On ZeRO 3 the head is lost.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.runtime.zero.partition_parameters import GatheredParameters


class Model(torch.nn.Module):
    """An embedding and a head, which is frozen, or the embedding's weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(int(tied))
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False).requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        return self.head(self.embedding(ids)).pow(2).mean()


def built(stage: int, tied: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over the embedding, and the head if it is the same."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Model(tied)
    given = [model.embedding.weight]
    return deepspeed.initialize(model=model, model_parameters=given, config=config)[0]


def weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """Return copies of the embedding and the head."""
    both = [engine.module.embedding.weight, engine.module.head.weight]
    with GatheredParameters(both if hasattr(both[0], "ds_id") else []):
        return [one.detach().clone() for one in both]


def loaded(stage: int) -> tuple[bool, str]:
    """Save and load; return whether that is refused, and what came of both weights."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    engine = built(stage, tied=False)
    engine.backward(engine(torch.tensor([1, 3], device=engine.device)))
    engine.step()
    embedding, head = weights(engine)
    engine.save_checkpoint(folders[0], tag="saved")
    dist.barrier()
    engine = built(stage, tied=True)
    try:
        engine.load_checkpoint(folders[0], tag="saved")
    except (ValueError, RuntimeError) as error:
        return True, f"it is refused: {type(error).__name__}"
    behind = weights(engine)[0]
    engine.backward(engine(torch.tensor([1, 3], device=engine.device)))
    engine.step()
    stepped = weights(engine)[0]
    apart = [float((one - other).abs().max()) for one in (behind, stepped) for other in (embedding, head)]
    return False, (
        f"it is loaded: the weight is {apart[0]:.2g} from the saved embedding and {apart[1]:.2g} from the head, and "
        f"behind a step {apart[2]:.2g} and {apart[3]:.2g}"
    )


def main() -> dict[str, str]:
    """Load it on each stage."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(loaded, stage) for stage in range(4)},
        said=lambda value: value[1],
        right=lambda value: value[0],
        fault=lambda value: not value[0],
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
