"""ZeRO 1 and 2: with another round_robin_gradients than that of the run that saved it, a checkpoint scrambles Adam.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/states_of_others.py

Ranks are given the parameters in another order, and each loads its part of the moments and of the weights in fp32 as
one flat tensor (_load_legacy_checkpoint of runtime/zero/stage_1_and_2.py). No message says so.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, in_turns: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine over five weights that each go their own way."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True, "weight_decay": 0.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "round_robin_gradients": in_turns},
    }
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
    for number, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, 0.1 * (number + 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def stepped(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """Return all weights behind a step."""
    engine.backward(engine(torch.ones(1, 4, device=engine.device)).pow(2).mean())
    engine.step()
    return torch.cat([one.detach().flatten().clone() for one in engine.module.parameters()])


def apart(stage: int, saved: bool, loads: bool) -> float:
    """Return how far a step from the checkpoint ends from that of the run which saved it, beside the step's length."""
    engine = built(stage, saved)
    before = stepped(engine)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        other = built(stage, loads)
        other.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    right = stepped(engine)
    return ((stepped(other) - right).norm() / (right - before).norm()).item()


def main() -> dict[str, str]:
    """Load with either setting what was saved with the other."""
    deepspeed.init_distributed()
    cells = [(stage, in_turns) for stage in (1, 2) for in_turns in (False, True)]
    return tell(
        {f"ZeRO {one}, {'on' if on else 'off'} when saved": partial(apart, one, on, not on) for one, on in cells},
        said=lambda value: f"the next step ends {value:.3f} of its length away from the right one",
        right=lambda value: value < 1e-5,
        fault=lambda value: value > 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
