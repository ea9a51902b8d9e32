"""ZeRO 1 and 2 with several parameter groups: safe_get_full_optimizer_state raises for all groups but the first.

    deepspeed --num_accelerators 1 tools/deepspeed_faults/states_of_later_groups.py

Groups are stepped one by one, and behind the first of them the states of all are linked to their parameters, once and
for all (stage_1_and_2.py, _optimizer_step and _lazy_init_hp_params_optimizer_state): later groups have none yet. With
several ranks the one that has the parameter raises, and the others wait for it until the process group's time is up.
Training itself is right.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.accelerator import get_accelerator


def linked(stage: int, groups: int) -> list[bool]:
    """Return whether Adam's first moment of each parameter is there to be read.

    It is asked of the mapping in which safe_get_full_optimizer_state looks: where one rank raises in it, others wait.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 2)
    parted = [[model.weight], [model.bias]] if groups > 1 else [[model.weight, model.bias]]
    optimizer = torch.optim.AdamW([{"params": part} for part in parted])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4, device=get_accelerator().current_device_name())).sum())
    engine.step()
    # None: no number of the parameter is this rank's.
    mappings = [parameter._hp_mapping for parameter in engine.module.parameters()]
    engine.destroy()
    return [mapping is None or "exp_avg" in (mapping.optim_fragment or {}) for mapping in mappings]


def main() -> dict[str, str]:
    """Look with one group and with two, on both stages."""
    return tell(
        {f"ZeRO {stage}, groups: {groups}": partial(linked, stage, groups) for stage in (1, 2) for groups in (1, 2)},
        said=lambda found: f"{sum(found)} of {len(found)} parameters have it",
        right=all,
        fault=lambda found: not all(found),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
