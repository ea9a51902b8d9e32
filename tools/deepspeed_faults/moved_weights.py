"""ZeRO 1 and 2: weights that were given memory of their own are stepped no more, or not loaded.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/moved_weights.py

`parameter.data = tensor` and `model.double()` and back take parameters out of the flat buffer of which they are views.
BF16_Optimizer steps the buffer, and never gives them their places again (bf16_optimizer.py, update_lp_params). A load
without the optimizer's states reads the buffer for the weights in fp32, and not what it has loaded into the parameters
(_restore_from_bit16_weights), so that the next step goes on from the old ones. Nothing is raised.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(value: float, rate: float, stage: int, summed: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over weights of a value."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": rate}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if summed:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    model = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: deepspeed.DeepSpeedEngine) -> float:
    """Return the weights behind a step."""
    weight = engine.module.weight
    engine.backward(engine(torch.ones(1, 8, dtype=weight.dtype, device=weight.device)).sum())
    engine.step()
    return weight.mean().item()


def move(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give the weights memory of their own, with the values that they have."""
    engine.module.weight.data = engine.module.weight.data.clone()


def stepped() -> float:
    """Return the share of a step that reaches weights which were moved."""
    engine = built(1.0, 0.5, 1, summed=True)
    move(engine)
    return (1.0 - step(engine)) / 0.5


def loaded(stage: int) -> float:
    """Return the share of a load of weights alone that is left behind a step at a rate of 0."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(5.0, 0.0, stage, summed=False).save_checkpoint(folders[0], tag="saved")
        engine = built(1.0, 0.0, stage, summed=False)
        move(engine)
        engine.load_checkpoint(folders[0], tag="saved", load_optimizer_states=False)
        dist.barrier()  # the first rank removes the folder
    return (step(engine) - 1.0) / 4.0


def main() -> dict[str, str]:
    """Step weights that were moved, and load into them."""
    deepspeed.init_distributed()
    places = {"ZeRO 1 in bf16 with fp32 accumulation": stepped}
    places |= {f"ZeRO {stage}, loaded alone": partial(loaded, stage) for stage in (1, 2)}
    return tell(
        places,
        said=lambda share: f"{share:.0%} of the step or of the load is there behind a step",
        right=lambda share: abs(share - 1) < 1e-3,
        fault=lambda share: share == 0,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
