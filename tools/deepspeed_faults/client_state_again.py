"""ZeRO 0: a client state that load_checkpoint() has returned, saved again, puts old states into the new checkpoint.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/client_state_again.py

load_checkpoint() returns most of the checkpoint as its client state, and save_checkpoint() writes the client state over
what it has just collected (`state.update(client_state)`, _save_checkpoint of runtime/engine.py). On ZeRO 0 the states
of the optimizer are among it. In bf16 these include the weights in fp32, so that a run which keeps its own values in a
client state, and goes on twice, loads the weights of the first time. (In fp32 on a CPU torch's optimizers go on in the
tensors that were loaded, which are therefore new ones.) Releases that know the key checkpoint_parallel_dimensions
raise a KeyError in save_checkpoint.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(stage: int, bf16: bool) -> deepspeed.DeepSpeedEngine:
    """Return an engine whose steps depend on those before."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def stepped(engine: deepspeed.DeepSpeedEngine) -> torch.Tensor:
    """Return the weights behind a step."""
    kind = engine.module.weight.dtype
    engine.backward(engine(torch.ones(1, 4, device=engine.device, dtype=kind)).float().pow(2).mean())
    engine.step()
    return engine.module.weight.detach().flatten().clone().float()


def apart(stage: int, bf16: bool) -> float:
    """Return how far a step from the second checkpoint ends from that of the run, beside the step's length."""
    engine = built(stage, bf16)
    stepped(engine)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="first", client_state={"epoch": 1})
        _, state = engine.load_checkpoint(folders[0], tag="first")
        for _ in range(4):
            before = stepped(engine)
        state["epoch"] = 2
        engine.save_checkpoint(folders[0], tag="second", client_state=state)
        other = built(stage, bf16)
        other.load_checkpoint(folders[0], tag="second")
        dist.barrier()  # the first rank removes the folder
    right = stepped(engine)
    return ((stepped(other) - right).norm() / (right - before).norm()).item()


def main() -> dict[str, str]:
    """Save a client state again that was loaded; ZeRO 1 keeps the optimizer's states in another file."""
    deepspeed.init_distributed()
    cells = [(stage, bf16) for stage in (0, 1) for bf16 in (False, True)]
    return tell(
        {f"ZeRO {stage}, {'bf16' if bf16 else 'fp32'}": partial(apart, stage, bf16) for stage, bf16 in cells},
        said=lambda value: f"the next step ends {value:.3f} of its length away from the right one",
        right=lambda value: value < 1e-5,
        fault=lambda value: value > 1e-2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
