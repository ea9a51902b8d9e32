"""ZeRO 1 and 2: behind load_checkpoint, safe_get_full_optimizer_state raises on the rank that has the state.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/states_behind_a_load.py

A load links parameters to their parts anew, without the optimizer's states (stage_1_and_2.py and bf16_optimizer.py,
_link_all_hp_params), and those are linked behind the first step of an engine alone. With several ranks the others wait
for the one that raises until the process group's time is up. Training itself is right.
"""

import sys
import tempfile
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def linked(stage: int, summed: bool) -> list[bool]:
    """Return whether Adam's first moment of each parameter is there to be read, behind a load and a step.

    It is asked of the mapping in which safe_get_full_optimizer_state looks: where one rank raises in it, others wait.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if summed:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    kind = torch.bfloat16 if summed else torch.float32

    def step() -> None:
        x = torch.ones(1, 4, device=get_accelerator().current_device_name(), dtype=kind)
        engine.backward(engine(x).sum())
        engine.step()

    step()
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)
        engine.save_checkpoint(folders[0], tag="saved")
        engine.load_checkpoint(folders[0], tag="saved")
        dist.barrier()  # the first rank removes the folder
    step()
    # None: no number of the parameter is this rank's.
    mappings = [parameter._hp_mapping for parameter in engine.module.parameters()]
    engine.destroy()
    return [mapping is None or "exp_avg" in (mapping.optim_fragment or {}) for mapping in mappings]


def main() -> dict[str, str]:
    """Look on both stages, and in bf16 with gradients summed in fp32."""
    deepspeed.init_distributed()
    places = {f"ZeRO {stage}": partial(linked, stage, summed=False) for stage in (1, 2)}
    places["ZeRO 1 in bf16 with fp32 accumulation"] = partial(linked, 1, summed=True)
    return tell(
        places,
        said=lambda found: f"{sum(found)} of {len(found)} parameters have it",
        right=all,
        fault=lambda found: not all(found),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
