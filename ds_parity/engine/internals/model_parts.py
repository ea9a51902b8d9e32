"""Ranks that hold parts of one model by an mpu of the caller's, as Megatron's: they share each micro-batch.

Their gradients are of other parameters, each its own, as with AutoTP. DeepSpeed sums them over the data-parallel ranks
of the mpu, and norms over its model-parallel ones. What is said of it here was read and measured in 0.19.8, on 2 and 4
ranks; tests/distributed/test_model_parts.py measures it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size, bwc_tensor_model_parallel_group

from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.internals.tensor_groups import refuse_norm_of_part
from ds_parity.errors import ConfigError

# What ZeRO 3 leaves on a parameter: the group over which it divides its gradient, and that of hpZ.
_GRADIENT: Final = "ds_process_group"
_WEIGHTS: Final = "ds_zero_param_process_group"
_GROUPS: Final = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group")


def parts_of(mpu: Any) -> list[int]:
    """Return the ranks that hold the parts of this rank's model, in the order of the parts; it alone where it has all.

    Args:
        mpu: of an engine; None for none. With sequence parallelism its group may be that of the slices.
    """
    if not any(hasattr(mpu, name) for name in _GROUPS):
        return [dist.get_rank()]
    # Of no group torch gives all ranks.
    group = bwc_tensor_model_parallel_group(mpu)
    return [dist.get_rank()] if group is None else list(dist.get_process_group_ranks(group))


def number_of_parts(engine: Engine) -> int:
    """Return how many ranks hold one model, by AutoTP or an mpu (>= 1); of a pipeline's stages each is one."""
    return 1 if engine.sequence_parallel_size > 1 else len(parts_of(engine.mpu))


def divided_by_mpu(engine: Engine) -> bool:
    """Return whether an mpu of the caller's divides the model: not AutoTP, and no stages of a pipeline.

    Args:
        engine: the bare engine, of a pipeline or not.
    """
    # The grid of a pipeline is an mpu, too.
    given = engine.mpu is not None and not hasattr(engine, "grid")
    return given and engine.autotp_size() < 2 and number_of_parts(engine) > 1


def has_parts(engine: Engine) -> bool:
    """Return whether a model's parameters are parts, by AutoTP, or by an mpu and the marks that Megatron gives them.

    Args:
        engine: the bare engine; one that only runs forward may be given an mpu beside a whole model.
    """
    marked = any(is_model_parallel_parameter(one) for one in engine.module.parameters())
    return engine.autotp_size() > 1 or (marked and number_of_parts(engine) > 1)


def refuse_slices_of_parts(engine: Engine, peers: set[int]) -> None:
    """Raise ConfigError where an mpu divides the model beside sequence parallelism, which nobody has measured.

    Args:
        engine: the bare engine.
        peers: the ranks that have slices of one micro-batch.
    """
    parts = parts_of(engine.mpu)
    # DeepSpeed's own mpu of sequence parallelism calls them model-parallel ones, too.
    if len(parts) > 1 and set(parts) != peers:
        raise ConfigError(
            f"an mpu that divides the model over ranks {parts}, and sequences over ranks {sorted(peers)}: nobody has "
            "measured both together; use one of them"
        )


def refuse_stages(engine: Engine) -> None:
    """Raise ConfigError where an mpu of a pipeline's stages is given for a model that is none.

    DeepSpeed adds the norm of the model up over stages then, each of which has all of it.
    """
    stages = bwc_pipeline_parallel_world_size(engine.mpu)
    if stages > 1:
        raise ConfigError(
            f"an mpu of {stages} pipeline stages, and model= is no deepspeed.PipelineModule: DeepSpeed runs stages of "
            "its own alone, and would add up the norm of the model over them; use deepspeed.PipelineModule, or an mpu "
            "with one stage"
        )


def divided_over(parameter: Any) -> list[Any]:
    """Return the process groups over which ZeRO 3 has divided a parameter, for its gradient and for its weights."""
    held = (getattr(parameter, name, None) for name in (_GRADIENT, _WEIGHTS))
    return [group for group in held if group is not None]


def refuse_mixed_parts(engine: Engine) -> None:
    """Raise ConfigError where an engine on ZeRO 3 would compute with a mixture of parts of the model.

    Args:
        engine: the bare engine, with AutoTP, or with an mpu without sequence parallelism.
    """
    if engine.autotp_size() <= 1:  # AutoTP divides what zero.Init has divided already as it should
        _refuse_other_partitions(engine)
    _refuse_copies_of_other_parts(engine)


def _refuse_other_partitions(engine: Engine) -> None:
    """Raise ConfigError where ZeRO 3 has divided a parameter over other ranks than sum its gradient.

    zero.Init takes all ranks, whatever the mpu (runtime/zero/partition_parameters.py): they hold different parts of the
    model, or different models.
    """
    for name, its, ours in _over_other_ranks(engine, _GRADIENT):
        raise ConfigError(
            f"{name} is divided over ranks {its}, and the mpu sums gradients over ranks {ours}: weights of "
            "different models, or of different parts, would be mixed, without an error; build the model under "
            "zero.Init(data_parallel_group=mpu.get_data_parallel_group()), or without zero.Init"
        )


def _refuse_copies_of_other_parts(engine: Engine) -> None:
    """Raise ConfigError where hpZ gathers weights from ranks that hold other parts of the model.

    It takes ranks that follow each other, whatever divides the model, and DeepSpeed keeps its group for all engines of
    the process that are built later (utils/groups.py, `_create_zero_param_parallel_group`; runtime/zero/stage3.py).
    """
    for name, its, ours in _over_other_ranks(engine, _WEIGHTS):
        raise ConfigError(
            f"zero_hpz_partition_size, of this engine or of an earlier one of this process, gathers {name} from ranks "
            f"{its}, and gradients are summed over ranks {ours}: weights of different parts of the model would be "
            "mixed, without an error; leave zero_hpz_partition_size out, in a new process"
        )


def _over_other_ranks(engine: Engine, kind: str) -> Iterator[tuple[str, list[int], list[int]]]:
    ours = sorted(dist.get_process_group_ranks(engine.data_parallel_group))
    named = {getattr(one, kind, None): name for name, one in engine.module.named_parameters()}
    named.pop(None, None)
    for group, name in named.items():
        its = sorted(dist.get_process_group_ranks(group))
        if not set(its) <= set(ours):
            yield name, its, ours


def refuse_unproven(engine: Engine, parts: int) -> None:
    """Raise ConfigError where DeepSpeed would step wrongly with parts of a model, or nobody has measured it.

    Args:
        engine: the bare engine.
        parts: how many ranks hold one model (>= 2).
    """
    asked = f"an mpu that divides the model over {parts} ranks"
    refuse_norm_of_part(engine, f"{asked},")
    if engine.has_moe_layers:
        raise ConfigError(f"{asked}, and experts: nobody has measured this; give the model no mpu, or no experts")
