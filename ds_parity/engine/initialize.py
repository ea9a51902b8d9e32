"""The drop-in for `deepspeed.initialize`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.config import Settings, load_config, parse, rewrite
from ds_parity.config.settings import key_path
from ds_parity.engine.engine import ParityEngine
from ds_parity.engine.internals.groups import sequence_parallel_size
from ds_parity.engine.listeners.monitoring import show
from ds_parity.engine.listeners.tracing import attach
from ds_parity.engine.ranks.agreement import agree, all_or_none, started_together, telling
from ds_parity.errors import ConfigError

Initialize: TypeAlias = Callable[..., tuple[Any, Any, Any, Any]]


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Initialize a DeepSpeed engine that steps by rollouts.

    Takes the keywords of `deepspeed.initialize` (deepspeed/__init__.py, 0.19.8). Without `gradient_accumulation_passes`
    in the configuration it returns precisely what `deepspeed.initialize` returns.

    Returns:
        engine, optimizer, training dataloader, LR scheduler.

    Raises:
        ConfigError: the extra keys, or their combination with DeepSpeed's, can't be right.
        RankDesyncError: ranks were given different configurations or models, or another one raised.
        TraceError: `ds_parity.trace` can't be written.
    """
    keywords: dict[str, Any] = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "distributed_port": distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
        "config": config,
        "mesh_param": mesh_param,
        "config_params": config_params,
    }
    extended = extended_config(keywords)
    bare: Initialize = deepspeed.initialize
    return bare(**keywords) if extended is None else honoured(keywords, extended, bare, ParityEngine)


def extended_config(keywords: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration that a call of `deepspeed.initialize` gives, None where it has none of the extra keys.

    Raises:
        ConfigError: the extra keys can't be right.
    """
    source = source_of(keywords)
    with telling(keywords.get("mpu")):
        extended = None if source is None else load_config(source)
        return None if extended is None or parse(extended) is None else extended


def source_of(keywords: Mapping[str, Any]) -> Any:
    """Return the configuration as it was given, by keyword or with the arguments; None where it was not."""
    args = keywords.get("args")
    given = (keywords.get("config"), keywords.get("config_params"))
    by_arguments = (getattr(args, "deepspeed_config", None), getattr(args, "deepscale_config", None))
    return next((source for source in (*given, *by_arguments) if source is not None), None)


def honoured(
    keywords: Mapping[str, Any], extended: dict[str, Any], bare: Initialize, kind: type[ParityEngine]
) -> tuple[Any, Any, Any, Any]:
    """Initialize with the extra keys.

    Args:
        keywords: those of `deepspeed.initialize`, as far as they were given.
        extended: the configuration among them.
        bare: DeepSpeed's own `initialize`.
        kind: of the engine to return.

    Raises:
        ConfigError: the extra keys, or their combination with DeepSpeed's, can't be right.
        RankDesyncError: ranks were given different configurations or models, or another one raised.
    """
    mpu, mesh_param = keywords.get("mpu"), keywords.get("mesh_param")
    with telling(mpu):
        _refuse_pipeline(keywords.get("model"))
        sequence = sequence_parallel_size(mpu, mesh_param, extended)
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=keywords.get("distributed_port", deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT),
        dist_init_required=keywords.get("dist_init_required"),
    )
    everybody = started_together(mpu)
    with all_or_none(everybody):
        rewritten = rewrite(extended, data_parallel_size(mpu, mesh_param, extended))
        rewritten.settings.target  # noqa: B018  # asked for its ConfigError: "auto" is filled in by now, or never
    number = agree(everybody, {**rewritten.config, **_by_path(rewritten.settings)}, keywords.get("model"))
    plain = {"args": _without_config(keywords.get("args")), "config": rewritten.config, "config_params": None}
    # All ranks have agreed by now, so that none waits inside DeepSpeed for one that raised.
    engine, optimizer, loader, _ = bare(**{**keywords, **plain})
    wrapped = kind(engine, rewritten.settings, sequence, number)
    show(wrapped._self_driver)
    with all_or_none(everybody):
        attach(wrapped._self_driver, rewritten.settings.trace, extended)
    return wrapped, optimizer, loader, engine.lr_scheduler


def _by_path(settings: Settings) -> dict[str, Any]:
    return {key_path(name): value for name, value in settings.model_dump().items()}


def _without_config(args: Any) -> Any:
    # DeepSpeed refuses a configuration in both places; the caller's own args stay as they are.
    if args is None:
        return None
    bare = copy.copy(args)
    for name in ("deepspeed_config", "deepscale_config"):
        if getattr(bare, name, None) is not None:
            setattr(bare, name, None)
    return bare


def data_parallel_size(mpu: Any, mesh_param: Any, config: dict[str, Any]) -> int:
    """Return how many ranks hold different micro-batches, as DeepSpeed counts them when it checks the batch size.

    runtime/config.py, 0.19.8. The process group must be there.
    """
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    sequence = sequence_parallel_size(mpu, mesh_param, config)
    if sequence > 1:
        return dist.get_world_size() // sequence
    if mesh_param:
        return int(mesh_param[0])
    section = config.get("tensor_parallel")
    autotp = section.get("autotp_size", 0) if isinstance(section, dict) else 0
    return dist.get_world_size() // (autotp if isinstance(autotp, int) and autotp > 1 else 1)


def _refuse_pipeline(model: Any) -> None:
    if isinstance(model, deepspeed.PipelineModule):
        raise ConfigError(
            "model is a PipelineModule: its train_batch() owns the micro-batches and the boundary, so passes can't be "
            "counted; use ZeRO without pipeline parallelism, or drop gradient_accumulation_passes"
        )
