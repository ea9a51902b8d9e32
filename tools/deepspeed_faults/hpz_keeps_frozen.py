"""ZeRO 3 with hpZ: behind load_checkpoint passes use the frozen weights that the engine had before.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/hpz_keeps_frozen.py

With `zero_hpz_partition_size` each parameter has a second copy, which is cleared for those that are stepped
(runtime/zero/stage3.py, invalidate_secondary_tensor). That of a frozen one stays as it was when the engine was built,
and backwards, or later forwards, gather it. Nothing is raised.
"""

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.utils import groups


def built(seed: int, hpz: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over two layers, the first of which is frozen."""
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of the engine before, which a later one would take
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            **({"zero_hpz_partition_size": dist.get_world_size()} if hpz else {}),
        },
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def losses(hpz: bool) -> list[float]:
    """Return the losses of four steps behind a load into an engine of another seed."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    built(0, hpz).save_checkpoint(folders[0], tag="saved")
    engine, found = built(1, hpz), []
    engine.load_checkpoint(folders[0], tag="saved")
    for number in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(engine.device)
        loss = engine(x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def apart() -> float:
    """Return how far a loss is from that of the same run without hpZ, as a share."""
    return max(abs(found / due - 1) for found, due in zip(losses(hpz=True), losses(hpz=False), strict=True))


def main() -> dict[str, str]:
    """Compare both."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 3": apart},
        said=lambda value: f"with hpZ a loss is {value:.2g} of it from that without",
        right=lambda value: value < 1e-5,
        fault=lambda value: value > 1e-3,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
