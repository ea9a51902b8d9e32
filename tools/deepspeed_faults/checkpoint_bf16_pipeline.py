"""A pipeline in bf16 on ZeRO 0: load_checkpoint() raises, and without the optimizer's states the next step undoes it.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/checkpoint_bf16_pipeline.py

Its optimizer has the weights in fp32, in parts, and saves them and its states in files of their own, as ZeRO does.
Loading looks for them only with ZeRO (runtime/engine.py, load_checkpoint and _load_checkpoint).
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell


def built(value: float) -> deepspeed.PipelineEngine:
    """Return a pipeline of one stage over weights of a value, whose steps change nothing."""
    linear = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.constant_(linear.weight, value)
    module = deepspeed.PipelineModule([linear], num_stages=1, loss_fn=lambda outputs, _: outputs.sum())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def loaded(states: bool) -> float | str:
    """Return the weight, one step at a rate of 0 after an engine of 1 has loaded what one of 5 has saved."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        built(5.0).save_checkpoint(folders[0], tag="saved")
        engine = built(1.0)
        try:
            engine.load_checkpoint(folders[0], tag="saved", load_optimizer_states=states)
        except (KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        dist.barrier()  # the first rank removes the folder
    x = torch.ones(1, 8, dtype=torch.bfloat16, device=engine.device)
    engine.train_batch(iter([(x, x)]))
    return next(engine.module.parameters()).float().mean().item()


def main() -> dict[str, str]:
    """Load with the optimizer's states and without them, and step."""
    deepspeed.init_distributed()
    return tell(
        {
            "ZeRO 0 in bf16, all is loaded": partial(loaded, True),
            "ZeRO 0 in bf16, the weights are loaded alone": partial(loaded, False),
        },
        said=lambda value: (
            f"the weight is {value:g} after loading and a step at a rate of 0; right is 5"
            if isinstance(value, float)
            else f"load_checkpoint() raises {value}"
        ),
        right=lambda value: value == 5,
        fault=lambda value: value == 1 or isinstance(value, str),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
