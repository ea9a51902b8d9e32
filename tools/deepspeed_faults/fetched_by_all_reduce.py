"""ZeRO 3 with stage3_use_all_reduce_for_fetch_params: weights whose size the ranks do not divide are gathered wrong.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/fetched_by_all_reduce.py

Each parameter has room for its padding in the buffer that is reduced, and the next one begins where its numbers end and
not its padding (runtime/zero/partition_parameters.py, `start_param += param.ds_numel`): the last rank adds what lies in
its padding, which nobody has written, to the first numbers of the next parameter.
"""

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell

OPTION = "stage3_use_all_reduce_for_fetch_params"


def distance(switch: bool, half: bool) -> float:
    """Return how far the outputs of a forward lie from those of the same model without ZeRO."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            OPTION: switch,
            "stage3_param_persistence_threshold": 0,
        },
    }
    if half:
        config["bf16"] = {"enabled": True}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    dtype = torch.bfloat16 if half else torch.float32
    sample = torch.ones(1, 5, dtype=dtype)
    with torch.no_grad():
        right = model.to(dtype)(sample).float()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if dist.get_rank() == dist.get_world_size() - 1:
        # What lies there is chance, as in all memory that nobody has written; 0 would be right.
        for parameter in model.parameters():
            part = parameter.ds_tensor
            padding = part.ds_numel * dist.get_world_size() - parameter.ds_numel
            part.data[part.ds_numel - padding :] = 1e3
    with torch.no_grad():
        found = engine(sample.to(engine.device)).float().cpu()
    engine.destroy()
    return (found - right).abs().max().item()


def main() -> dict[str, str]:
    """Compare with and without the option, in two precisions. Needs two ranks."""
    deepspeed.init_distributed()
    return tell(
        {
            f"ZeRO 3 in {'bf16' if half else 'fp32'}{f' with {OPTION}' if switch else ''}": partial(
                distance, switch, half
            )
            for half in (False, True)
            for switch in (False, True)
        },
        said=lambda off: f"off by {off:g}, right is 0",
        right=lambda off: off < 0.02,
        fault=lambda off: off >= 0.02,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
