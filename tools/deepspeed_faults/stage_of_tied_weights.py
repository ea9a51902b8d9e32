"""A pipeline in bf16 on ZeRO 0: a stage that has nothing but weights of the first one raises, and the others wait.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/stage_of_tied_weights.py

The norm counts a tied weight on the first of its stages alone (runtime/bf16_optimizer.py, get_grads_for_norm). A stage
without another weight has none that counts, and DeepSpeed takes no norm of none (runtime/utils.py,
get_global_norm_of_tensors).
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from _places import NotThere, exit_code, tell
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import get_global_norm_of_tensors


def raised() -> float:
    """Take the norm of a gradient with both stages of one tied layer; return on how many of them DeepSpeed raises."""
    layers = [TiedLayerSpec("tied", torch.nn.Linear, 8, 8, bias=False) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.sum())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if not isinstance(engine.optimizer, BF16_Optimizer):
        raise NotThere(f"bf16 on ZeRO 0 has a {type(engine.optimizer).__name__} here")
    # What train_batch() does behind the layers. In it the first stage would wait for the part of the last one.
    engine.module.tied_modules["tied"].weight.sum().backward()
    engine.optimizer.update_hp_grads()
    counted, _ = engine.optimizer.get_grads_for_norm()
    stages = torch.zeros(1, device=engine.device)
    try:
        get_global_norm_of_tensors(counted)
    except (RuntimeError, IndexError) as error:
        print(f"stage {engine.stage_id}, where {len(counted)} gradients count: {type(error).__name__}: {error}")
        stages += 1
    dist.all_reduce(stages)
    engine.destroy()
    return float(stages)


def main() -> dict[str, str]:
    """Take the norm in bf16 on ZeRO 0."""
    deepspeed.init_distributed()
    return tell(
        {"ZeRO 0 in bf16": raised},
        said=lambda found: f"the norm raises on {found:g} of 2 stages; 0 is right",
        right=lambda found: found == 0,
        fault=lambda found: found == 1,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
