"""AutoTP: ranks that hold parts of one model, run the same micro-batch, and count it once.

What is said of DeepSpeed here was read and measured in 0.19.8, on 2 and 4 ranks; tests/distributed/test_autotp.py
measures it again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import deepspeed
import torch
import torch.distributed as dist

from ds_parity.all_weights import whole
from ds_parity.config.autotp import TENSOR_PARALLEL, autotp_size, data_parallel_ranks
from ds_parity.engine.internals.replaced import replaced
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import ConfigError

# Norms of the heads of queries and keys: each rank applies them to its own heads alone.
_HEAD_NORM: Final = re.compile(r"\b(?:q|k|query|key)_?(?:layer)?_?norm\b")
_REMEMBERED: Final = (
    "deepspeed.utils.groups keeps the groups of an earlier AutoTP engine of this process; start a new process for "
    "engines of another size"
)


def with_recorded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the size that `deepspeed.tp_model_init` has recorded, where it names none.

    DeepSpeed puts it into the configuration of every engine that is built after the call (runtime/tensor_parallel/
    init_utils.py, merge_tp_model_init_into_config).
    """
    recorded = _recorded()
    section = config.get(TENSOR_PARALLEL) or {}
    if recorded is None or not isinstance(section, Mapping) or section.get("autotp_size") is not None:
        return dict(config)
    return {**config, TENSOR_PARALLEL: {**section, "autotp_size": recorded["tp_size"]}}


def refuse_group(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where a group for AutoTP stands in the configuration, or `tp_model_init` has recorded one.

    Args:
        config: that DeepSpeed would be given.
    """
    section = _mapping(config.get(TENSOR_PARALLEL))
    inner = _mapping(section.get("tp") or section.get(TENSOR_PARALLEL))
    if any(one.get("tp_group") is not None for one in (_mapping(_recorded()), section, inner)):
        # The first rank alone would raise: it prints the configuration, in which the group stands, as JSON.
        raise ConfigError(
            "tp_group is given (to tp_model_init(), or in tensor_parallel): DeepSpeed builds no engine with it "
            "(runtime/config.py, print_user_config: a group is no JSON), and sums gradients over groups of ranks that "
            "follow each other, whatever the group is (utils/groups.py, _init_tp_mesh_device). Leave tp_group out in a "
            "new process"
        )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _recorded() -> Mapping[str, Any] | None:
    module = sys.modules.get("deepspeed.runtime.tensor_parallel.init_utils")
    return getattr(module, "_TP_MODEL_INIT_ARGS", None)


def ranks_apart(config: Mapping[str, Any], mpu: Any, mesh_param: Any) -> int:
    """Return how many data-parallel ranks there are under AutoTP; the process group must be there.

    Args:
        config: which switches it on.
        mpu: what the caller gives.
        mesh_param: likewise.

    Raises:
        ConfigError: DeepSpeed would take other groups than the caller thinks, or can't form them.
    """
    given = "mpu=" if mpu is not None else "mesh_param=" if mesh_param else None
    if given is not None:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {autotp_size(config)} with {given}: AutoTP makes groups of its own and "
            "forgets those (DeepSpeed runtime/engine.py, _configure_tensor_parallel_states), so that sequence "
            f"parallelism or another division of the ranks would be lost; leave {given} out, or AutoTP"
        )
    return data_parallel_ranks(config, dist.get_world_size())


def peers_of(engine: Engine, size: int) -> list[int]:
    """Return the ranks that share this rank's micro-batch, itself included.

    Args:
        engine: the bare engine.
        size: of AutoTP (>= 1).

    Raises:
        ConfigError: the engine has groups of another size, or would step wrongly over them.
    """
    world = dist.get_world_size()
    if size == 1:
        return [dist.get_rank()]
    peers = dist.get_process_group_ranks(engine.mpu.get_tensor_model_parallel_group())
    if len(peers) != size or dist.get_world_size(engine.data_parallel_group) * size != world:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size}, but DeepSpeed took groups of {len(peers)} ranks: {_REMEMBERED}"
        )
    refuse_norm_of_part(engine, f"tensor_parallel.autotp_size = {size}")
    _refuse_partial_norms(engine)
    return peers


def refuse_remembered() -> None:
    """Raise ConfigError where DeepSpeed would give an engine of the whole model the groups of an earlier one's parts.

    It would end in DeepSpeed's own AttributeError (runtime/engine.py, _configure_distributed_model). The earlier engine
    had AutoTP, or was a pipeline. One with an mpu leaves its data-parallel ranks.
    """
    groups = deepspeed.utils.groups
    if groups.mpu is groups and groups.mesh_device is None:
        raise ConfigError(
            "the configuration has no tensor_parallel.autotp_size, but an earlier engine of this process had it: "
            f"{_REMEMBERED}, or set deepspeed.utils.groups.mpu to None before initialize()"
        )
    # Only the grid of a pipeline has this name.
    stages = getattr(groups.mpu, "get_pipe_parallel_world_size", int)()
    if stages > 1:
        raise ConfigError(
            f"model= is no deepspeed.PipelineModule, but an earlier engine of this process was a pipeline of {stages} "
            "stages, and deepspeed.utils.groups keeps its groups: set deepspeed.utils.groups.mpu to None before "
            "initialize()"
        )
    if groups.mpu is not None and groups.mpu is not groups and hasattr(groups.mpu, "get_data_parallel_group"):
        _refuse_fewer_ranks(groups.mpu)


def refuse_remembered_parts() -> None:
    """Raise ConfigError where DeepSpeed would end in an AttributeError for an engine that only runs forward.

    It asks the engine's mpu, which is None, for a rank among those of the one that it remembers (runtime/engine.py,
    _configure_distributed_model). Of sequence parallelism it does not.
    """
    kept = deepspeed.utils.groups.mpu
    if kept is None or hasattr(kept, "initialize_sequence_parallel"):
        return
    ranks = kept.get_model_parallel_world_size()
    if ranks > 1:
        raise ConfigError(
            f"no mpu is given, but an earlier engine of this process had one (or AutoTP) that divides the model over "
            f"{ranks} ranks, and deepspeed.utils.groups keeps it. Pass that mpu again if this model is divided, too, "
            "or set deepspeed.utils.groups.mpu to None before initialize()"
        )


def _refuse_fewer_ranks(kept: Any) -> None:
    try:
        ranks = dist.get_process_group_ranks(kept.get_data_parallel_group())
    except KeyError:
        ranks = []  # a group that was destroyed
    if len(ranks) < dist.get_world_size():
        raise ConfigError(
            f"no mpu is given, but an earlier engine of this process had one, and deepspeed.utils.groups keeps it: "
            f"DeepSpeed would sum gradients over its data-parallel ranks {ranks} alone, of {dist.get_world_size()}. "
            "Pass that mpu again, or set deepspeed.utils.groups.mpu to None before initialize()"
        )


def holds_parts(engine: Engine) -> bool:
    """Return whether ranks hold parts of the model by AutoTP, and DeepSpeed saves it without gathering them.

    On ZeRO 3 it gathers what AutoTP has divided, too.

    Args:
        engine: the bare engine.
    """
    return engine.autotp_size() > 1 and int(engine.zero_optimization_stage()) < 3


def whole_state(engine: Engine, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `module_state_dict` gives, with whole parameters on the host, on the first rank; every rank calls.

    Args:
        engine: the bare engine, whose ranks hold parts.
        state: of this rank.
    """
    first, parts = dist.get_rank() == 0, dict[int, torch.Tensor]()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name not in state:
            continue
        # Tied parameters stay one.
        if id(parameter) not in parts:
            gathered = whole(parameter, parameter.detach())
            parts[id(parameter)] = gathered.cpu() if first else parameter
        state[name] = parts[id(parameter)]
    return state if first else None


@contextmanager
def whole_where_it_saves(engine: Engine) -> Iterator[None]:
    """Let `save_16bit_model` write whole parameters; every rank calls.

    On ZeRO 0 to 2 DeepSpeed writes what the first rank has (runtime/engine.py, save_16bit_model): under AutoTP, its
    part.

    Args:
        engine: the bare engine, whose ranks hold parts.
    """
    own = engine.module_state_dict
    with replaced(engine, "module_state_dict", lambda *args, **kwargs: whole_state(engine, own(*args, **kwargs))):
        yield


def refuse_norm_of_part(engine: Engine, asked: str) -> None:
    """Raise ConfigError where DeepSpeed takes the norm of one part of a divided model for that of all.

    Args:
        engine: the bare engine, whose ranks hold parts.
        asked: what divides the model, as the message begins.
    """
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
        kind = type(engine.basic_optimizer)
        raise ConfigError(
            f"{asked} on ZeRO stage 0 in fp16 or bf16 with "
            f"{kind.__name__}: DeepSpeed takes the norm of the first rank's part of the model alone "
            "(runtime/fp16/unfused_optimizer.py, step), so that clipping and the logged norm are wrong; use "
            "DeepSpeed's own Adam or AdamW (optimizer.type, without torch_adam in its params), or ZeRO stage 1, 2 or 3"
        )


def _refuse_partial_norms(engine: Engine) -> None:
    apart = list(_norms_of_heads(engine))
    if apart:
        raise ConfigError(
            f"{apart[0]} (and {len(apart) - 1} more): a norm of heads, of which each rank has its own, and DeepSpeed "
            "does not sum its gradient over them, so that ranks' weights would differ without an error (module_inject/"
            "auto_tp.py, register_replicated_grad_hooks, knows them from the model's plan alone). Give initialize() "
            "the model of transformers itself, or set `config` of the module around it to the model's"
        )


def _norms_of_heads(engine: Engine) -> Iterator[str]:
    for name, parameter in engine.module.named_parameters():
        summed = getattr(parameter, "_ds_grad_allreduce_registered", False)
        if _HEAD_NORM.search(name) and not summed and not hasattr(parameter, "gather_params"):
            yield name
