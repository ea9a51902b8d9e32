"""Ranks that step together, and those among them that share a micro-batch and count it once.

They share it by sequence parallelism, where each has a slice of it, or where each has a part of the model, by AutoTP or
an mpu of the caller's.

What is said of DeepSpeed here was read and measured in 0.19.8, on 4 ranks in groups of 2; tests/distributed/
test_sequence.py measures it again. `ds_process_group` is what zero.Init leaves on a ZeRO 3 parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_parity.engine.internals.dropped_tokens import refuse_dropped_tokens
from ds_parity.engine.internals.model_parts import (
    divided_over,
    parts_of,
    refuse_mixed_parts,
    refuse_slices_of_parts,
    refuse_stages,
    refuse_unproven,
)
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.internals.tensor_groups import peers_of
from ds_parity.engine.ranks.hostgroups import group_joining, group_of_same
from ds_parity.engine.ranks.wire import Peers
from ds_parity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that step together.

    Attributes:
        group: process group of all of them, data- x sequence-parallel, or data- x tensor-parallel.
        ranks: data-parallel ranks (>= 1): as many micro-batches as a pass has.
        peers: this rank among those that share its micro-batch.
        data_group: process group of those that read different micro-batches, one of each peers: this rank is in it
            what `micro_batches` calls its data-parallel rank.
        summed: how many of the peers' gradients DeepSpeed adds up: all with sequence parallelism, and of those that
            have parts of the model, and so gradients of other parameters, each its own (1).
    """

    group: Any
    ranks: int
    peers: Peers
    data_group: Any
    summed: int = 1


def sequence_parallel_size(mpu: Any, mesh_param: Any, config: Mapping[str, Any]) -> int:
    """Return the size of the sequence-parallel groups that DeepSpeed would take from these.

    Raises:
        ConfigError: DeepSpeed would not sum gradients over such a group, or the configuration names another size.
    """
    size, where = _size_and_source(mpu, mesh_param, config)
    named = config.get("sequence_parallel_size", size)
    if size > 1 and not hasattr(mpu, "get_sequence_data_parallel_group"):
        raise ConfigError(
            f"a sequence-parallel size of {size} from {where}, without an mpu that has "
            "get_sequence_data_parallel_group: DeepSpeed sums gradients over the data-parallel ranks of one slice "
            "then, so the slices of a micro-batch are never added and ranks' weights part; pass "
            f"mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp after its initialize_sequence_parallel({size})"
        )
    if named not in (size, "auto"):
        raise ConfigError(
            f"sequence_parallel_size = {named!r}, but the sequence-parallel size from {where} is {size}: DeepSpeed "
            "takes its groups from the mpu, and the key alone changes only how it checks the batch size; pass an mpu "
            "with groups of that size (deepspeed.runtime.sequence_parallel.parallel_state_sp), or make the two agree"
        )
    return size


def members_of(engine: Engine, size: int) -> Members:
    """Return the ranks that step together under a DeepSpeed engine.

    Args:
        engine: the bare engine.
        size: sequence-parallel size that it was asked for (>= 1).

    Raises:
        ConfigError: the engine has groups of another size, or sums gradients wrongly over them.
    """
    refuse_dropped_tokens(engine)
    if (tensor := max(1, engine.autotp_size())) > 1:
        own = peers_of(engine, tensor)
        refuse_mixed_parts(engine)
        number, ranks = own.index(dist.get_rank()), dist.get_world_size() // tensor
        data_group = _data_group(engine, dist.group.WORLD, number, ranks)
        return Members(dist.group.WORLD, ranks, Peers(tensor, number, own[0]), data_group)
    if engine.sequence_parallel_size != size:
        raise ConfigError(
            f"DeepSpeed took a sequence-parallel size of {engine.sequence_parallel_size}, but {size} was asked for: it "
            "remembers the mpu or mesh of an earlier initialize() in this process; pass that mpu again, or set "
            "deepspeed.utils.groups.mpu and .mesh_device to None before"
        )
    # Without sequence parallelism DeepSpeed leaves the other two groups unset.
    if size == 1:
        return _by_data(engine)
    group, peers = engine.seq_data_parallel_group, dist.get_process_group_ranks(engine.seq_parallel_group)
    refuse_slices_of_parts(engine, set(peers))
    _refuse_wrong_sums(engine, set(peers))
    number, ranks = dist.get_rank(engine.seq_parallel_group), dist.get_world_size(group) // size
    data_group = _data_group(engine, group, number, ranks)
    return Members(group, ranks, Peers(size, number, peers[0]), data_group, size)


def _by_data(engine: Engine) -> Members:
    group, parts = engine.data_parallel_group, parts_of(engine.mpu)
    refuse_stages(engine)
    if engine.mpu is not None:
        refuse_mixed_parts(engine)
    ranks = dist.get_world_size(group)
    if len(parts) == 1:
        return Members(group, ranks, Peers(), group)
    refuse_unproven(engine, len(parts))
    together = group_joining(parts, group)
    if dist.get_world_size(together) != ranks * len(parts):
        raise ConfigError(
            f"the mpu divides the model over ranks {parts}, whose data-parallel groups have "
            f"{dist.get_world_size(together)} ranks together, not {ranks} * {len(parts)}: each rank that has a part "
            "must be in a data-parallel group of its own, all of one size; mend the groups of the mpu"
        )
    return Members(together, ranks, Peers(len(parts), parts.index(dist.get_rank()), parts[0]), group)


def _data_group(engine: Engine, group: Any, number: int, ranks: int) -> Any:
    """Return DeepSpeed's data-parallel group, or one that is made where it has none: the mpu of ALST knows none.

    All ranks of the job call, alike; `number` is that of this rank among its peers.
    """
    known = engine.data_parallel_group
    if known is not None and known is not dist.group.WORLD and dist.get_world_size(known) == ranks:
        return known  # that of AutoTP, or of a mesh
    return group_of_same((tuple(sorted(dist.get_process_group_ranks(group))), number))


def groups_of(engine: Engine) -> list[Any]:
    """Return the process groups of this rank that DeepSpeed may communicate over in a pass.

    They are whatever groups the engine, its mpu, its optimizer's wrapper, the parameters of ZeRO 3 and DeepSpeed's own
    registry hold: found by type, because their names differ by stage, and between an mpu, experts and hpZ.

    Args:
        engine: the bare engine.
    """
    held = [dist.group.WORLD]
    for owner in (deepspeed.utils.groups, engine, engine.mpu, engine.optimizer):
        held += _values(owner)
    for parameter in engine.module.parameters():
        held += divided_over(parameter)
    return list({id(one): one for one in held if isinstance(one, dist.ProcessGroup)}.values())


def _values(owner: Any) -> list[Any]:
    values = list(getattr(owner, "__dict__", {}).values())
    # Groups of experts stand in a dictionary by name.
    return [*values, *(one for held in values if isinstance(held, dict) for one in held.values())]


def _size_and_source(mpu: Any, mesh_param: Any, config: Mapping[str, Any]) -> tuple[int, str]:
    # The order of deepspeed/__init__.py and utils/groups.py.
    if mesh_param:
        return int(mesh_param[1]), "mesh_param"
    if {"data_parallel_size", "sequence_parallel_size"} <= config.keys():
        return int(config["sequence_parallel_size"]), "data_parallel_size and sequence_parallel_size"
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        return int(mpu.get_sequence_parallel_world_size()), "the mpu"
    return 1, "no mpu and no mesh_param"


def _refuse_wrong_sums(engine: Engine, peers: set[int]) -> None:
    groups = {
        engine.seq_data_parallel_group,
        *(getattr(p, "ds_process_group", None) for p in engine.module.parameters()),
    }
    for group in groups - {None}:
        # A group without a peer sums one slice alone, and no error shows.
        if not peers <= set(ranks := dist.get_process_group_ranks(group)):
            raise ConfigError(
                f"gradients are summed over ranks {ranks}, which leaves out sequence-parallel peers {sorted(peers)}: "
                "the slices of a micro-batch are never added and ranks' weights part. ZeRO 3 takes the group from the "
                "mpu's get_data_parallel_group where there is one; use "
                "deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu, build the model under "
                "zero.Init(sequence_data_parallel_group=...), or use ZeRO 2"
            )
    stage, scatters = engine.zero_optimization_stage(), engine.zero_reduce_scatter()
    if stage == 3 and not scatters:
        raise ConfigError(
            "zero_optimization.reduce_scatter = false with sequence parallelism on ZeRO stage 3: gradients that fit "
            "reduce_bucket_size are averaged over data-parallel ranks, larger ones over all ranks, so parameters of "
            "one model get different factors; leave reduce_scatter out"
        )
    model_parallel = getattr(engine.mpu, "get_model_parallel_group", lambda: None)()
    if isinstance(engine.optimizer, BF16_Optimizer) and model_parallel is engine.seq_parallel_group:
        raise ConfigError(
            "bf16 with fp32 accumulation on ZeRO stage 1, and an mpu whose get_model_parallel_group is the "
            "sequence-parallel one: BF16_Optimizer takes its ranks for tensor-parallel ones, has no gradient left to "
            "take the norm of on all but the first, and raises in step(); use ZeRO stage 2 or 3, or leave "
            "data_types.grad_accum_dtype out"
        )
    factor = engine.gradient_predivide_factor()
    if stage in (1, 2) and not scatters and factor == dist.get_world_size(engine.seq_data_parallel_group):
        raise ConfigError(
            f"gradient_predivide_factor = {factor:g} with sequence parallelism, equal to the number of ranks: ZeRO "
            f"stage {stage} without reduce_scatter then leaves the sequence-parallel size out of the mean; remove it"
        )
