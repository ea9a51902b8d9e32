"""Optimizer's states on NVMe, of which no run can be resumed.

Read and measured in DeepSpeed 0.19.8 (runtime/engine.py, load_checkpoint; tools/deepspeed_faults/nvme_not_loaded.py):
it copies the swapped files of a checkpoint back, found by numbers that parameters had in the process that saved. All
else of the optimizer it leaves out: its count of steps, the learning rates of its groups, and the fp32 weights and
states of sub-groups below 1 MB, which are not swapped. The run goes on otherwise, without an error. A second save under
a tag ends in a FileExistsError behind the files of the model, and leaves a mixture of two saves.
"""

from __future__ import annotations

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError


def refuse_swapped(engine: Engine, call: str, done: str) -> None:
    """Raise CheckpointError where the optimizer's states lie on NVMe.

    Args:
        engine: the bare engine.
        call: what was called.
        done: what has not been done yet.
    """
    if engine.zero_nvme_offload_optimizer():
        raise CheckpointError(
            f"{call} with the optimizer's states on NVMe (zero_optimization.offload_optimizer.device): DeepSpeed loads "
            "neither its count of steps nor the learning rates of its groups, nor what is too small to be swapped "
            "(runtime/engine.py, load_checkpoint), so that a run would go on otherwise, without an error. "
            f"{done}; offload them to the CPU where a run is to be resumed, or save the weights alone "
            "(save_16bit_model with stage3_gather_16bit_weights_on_model_save)"
        )
