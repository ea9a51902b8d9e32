"""The drop-in for `deepspeed.initialize`."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_parity.config import Settings, load_config, misspelt, parse, rewrite, versions
from ds_parity.config.autotp import autotp_size
from ds_parity.config.faults import refuse
from ds_parity.config.features import Wanted
from ds_parity.config.handed_on import is_comment, refuse_handed_on
from ds_parity.config.rewrite import Rewrite
from ds_parity.config.settings import PASSES, SECTION, key_path
from ds_parity.config.unfilled import refuse_unfilled
from ds_parity.engine.engine import ParityEngine
from ds_parity.engine.foreign_parameters import (
    given_in_words,
    groups_handed_over,
    groups_in_words,
    handed_over,
    held,
    refuse_foreign_parameters,
    refuse_foreign_scheduler,
    refuse_foreign_scheduler_made,
    refuse_without_rate,
)
from ds_parity.engine.internals import unread
from ds_parity.engine.internals.adagrad import own_adagrad
from ds_parity.engine.internals.autocast import keep_comm_dtype, own_autocast
from ds_parity.engine.internals.broadcast import any_shape_is_sent
from ds_parity.engine.internals.dropped_tokens import refuse_dropped_tokens, watch_forwards
from ds_parity.engine.internals.experts_in_order import experts_in_one_order
from ds_parity.engine.internals.groups import sequence_parallel_size
from ds_parity.engine.internals.installed import installed
from ds_parity.engine.internals.model_parts import has_parts, refuse_mixed_parts
from ds_parity.engine.internals.older import building
from ds_parity.engine.internals.passing_through import let_others_pass
from ds_parity.engine.internals.replaced_layers import layers_of
from ds_parity.engine.internals.tensor_groups import (
    ranks_apart,
    refuse_group,
    refuse_remembered,
    refuse_remembered_parts,
    with_recorded,
)
from ds_parity.engine.internals.unable import refuse_unable
from ds_parity.engine.listeners.monitoring import show
from ds_parity.engine.listeners.tracing import attach, refuse_shared, start_of_trace
from ds_parity.engine.pipeline import PipelinedEngine
from ds_parity.engine.pipeline_refusals import refuse_in_pipelines, refuse_stage_without_training
from ds_parity.engine.ranks.agreement import (
    Asked,
    agree,
    all_or_none,
    naming_lost_ranks_of_torch,
    started_together,
    telling,
)
from ds_parity.engine.startup import refuse_local_rank, refuse_without_assertions
from ds_parity.engine.unfit import refuse_optimizer, refuse_unfit
from ds_parity.engine.waiting import saying_what_is_waited_for
from ds_parity.errors import ConfigError

_LOG = logging.getLogger("ds_parity")
_BY_ARGUMENTS = ("deepspeed_config", "deepscale_config")
_SAID: set[str] = set()

Initialize: TypeAlias = Callable[..., tuple[Any, Any, Any, Any]]
_SaidOf: TypeAlias = Callable[[Any], dict[str, str]]


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
) -> tuple[ParityEngine, Any, Any, Any]:
    """Initialize a DeepSpeed engine that steps by rollouts.

    Takes the keywords of `deepspeed.initialize` (`deepspeed/__init__.py`, 0.19.8). Without
    `gradient_accumulation_passes` in the configuration it returns precisely what `deepspeed.initialize` returns: the
    bare engine. The type says `ParityEngine` all the same, so that editors and type checkers know the engine that there
    is with the key.

    All ranks of the job call it, alike, with an mpu too: they compare what they were given before an engine is built.

    With a `deepspeed.PipelineModule` it returns a `PipelinedEngine`, whose `train_window()` trains one window.

    Without an optimizer, neither `optimizer=` nor a section `optimizer`, as for a reference model with the actor's
    configuration, the engine is DeepSpeed's own too, and a warning says so: it runs forward, and counts nothing.

    Returns:
        engine, optimizer, training dataloader, LR scheduler.

    Raises:
        ConfigError: the extra keys, or their combination with DeepSpeed's, can't be right; ZeRO 1 or 2 have no
            optimizer, without which DeepSpeed takes stages 0 and 3 alone; or Python runs without assertions (-O).
        RankDesyncError: ranks were given different configurations, models or optimizers, or another one
                raised.
        TraceError: `ds_parity.trace` can't be written, or another engine of this process writes to it, one that is
            neither gone nor finished.
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
        if extended is None:
            return None
        settings = parse(extended)
        if settings is not None:
            _refuse_two_sources(keywords)
    _warn_of_misspelt(extended)
    return None if settings is None else extended


def _refuse_two_sources(keywords: Mapping[str, Any]) -> None:
    # DeepSpeed raises a bare assertion (deepspeed/__init__.py, 0.19.8).
    by_keyword = next((name for name in ("config", "config_params") if keywords.get(name) is not None), None)
    by_arguments = next((n for n in _BY_ARGUMENTS if getattr(keywords.get("args"), n, None) is not None), None)
    if by_keyword and by_arguments:
        raise ConfigError(
            f"initialize() got a configuration twice, as {by_keyword}= and as args.{by_arguments} (--{by_arguments} on "
            "the command line): they may say different things; give it in one place"
        )


def _warn_of_misspelt(config: Mapping[str, Any]) -> None:
    """Say which keys DeepSpeed is about to ignore: once for each on the first rank, as several engines may share it."""
    # The process group is not there yet: the launcher's own word for the rank.
    if os.environ.get("RANK", "0") != "0":
        return
    for text in map(str, misspelt(config)):
        if text not in _SAID:
            _SAID.add(text)
            _LOG.warning("the DeepSpeed configuration: %s", text)


def source_of(keywords: Mapping[str, Any]) -> Any:
    """Return the configuration as it was given, by keyword or with the arguments; None where it was not."""
    given = (keywords.get("config"), keywords.get("config_params"))
    by_arguments = (getattr(keywords.get("args"), name, None) for name in _BY_ARGUMENTS)
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
    mpu, mesh_param, extended = keywords.get("mpu"), keywords.get("mesh_param"), with_recorded(extended)
    optimizer, sequence = _optimizer_of(keywords, extended), 1
    pipeline = isinstance(keywords.get("model"), deepspeed.PipelineModule)
    with telling(mpu):
        if optimizer is not None:
            if pipeline:
                refuse_in_pipelines(parse(extended), extended, plain=kind is ParityEngine)
            sequence = sequence_parallel_size(mpu, mesh_param, extended)
    if pipeline:
        mpu = keywords["model"].mpu()  # the ranks that hold the same layers
    with saying_what_is_waited_for():
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=keywords.get("distributed_port", deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT),
            dist_init_required=keywords.get("dist_init_required"),
        )
    everybody = started_together(mpu)
    with all_or_none(everybody):
        refuse_local_rank(keywords.get("args"))
        refuse_group(extended)
        if optimizer is None:
            _refuse_without_optimizer(extended)
        else:
            refuse_without_assertions()
            keywords = {**keywords, "model_parameters": held(keywords.get("model_parameters"))}
            refuse_foreign_parameters(keywords)
            refuse_foreign_scheduler(keywords)
            rewritten = _rewritten(keywords, extended, data_parallel_size(mpu, mesh_param, extended))
            if pipeline:
                refuse_stage_without_training(keywords["model"], handed_over(keywords))
    # By itself, because without an optimizer all else differs.
    agree(everybody, {"where their optimizer comes from": optimizer or "nowhere"})
    if optimizer is None:
        # A framework knows which of its engines it trains; who calls ds_parity may have forgotten the optimizer.
        _say_what_it_is(keywords.get("model"), logging.WARNING if kind is ParityEngine else logging.INFO)
        return _forward_only({**keywords, **without_keys(keywords, extended)}, extended, bare, everybody)
    number = agree(everybody, {**_alike(rewritten), **given_in_words(keywords)}, keywords.get("model"))
    refuse_shared(everybody, rewritten.settings.trace, keywords.get("model"))
    keywords = {**keywords, **_made_together(keywords, everybody)}
    plain = {"args": _without_config(keywords.get("args")), "config": rewritten.config, "config_params": None}
    whole = layers_of(keywords.get("model"), rewritten.config)
    # All ranks have agreed by now, so that none waits inside DeepSpeed for one that raised.
    with (
        saying_what_is_waited_for(),
        naming_lost_ranks_of_torch("initialize(), where DeepSpeed builds the engine"),
        building(),
        any_shape_is_sent(),
        own_adagrad(),
        own_autocast(),
        experts_in_one_order(),
        whole.explaining(),
    ):
        engine, wrapper, loader, _ = bare(**{**keywords, **plain})
        keep_comm_dtype(engine)
    with all_or_none(everybody):
        whole.refuse_lost()
        refuse_foreign_scheduler_made(keywords, engine.lr_scheduler, engine.optimizer)
    refuse_unable(engine)
    if pipeline:
        return PipelinedEngine(engine, rewritten.settings, number), wrapper, loader, engine.lr_scheduler
    wrapped = kind(engine, rewritten.settings, sequence, number)
    show(wrapped._self_driver)
    start = start_of_trace(everybody, rewritten.settings.trace, engine.module)
    with all_or_none(everybody):
        attach(wrapped._self_driver, rewritten.settings.trace, extended, start)
    return wrapped, wrapper, loader, engine.lr_scheduler


def _rewritten(keywords: Mapping[str, Any], extended: Mapping[str, Any], ranks: int) -> Rewrite:
    """Return the configuration as DeepSpeed gets it, once it was seen to fit the model and the optimizer."""
    rewritten = rewrite(extended, ranks)
    rewritten.settings.target  # noqa: B018  # asked for its ConfigError: "auto" is filled in by now, or never
    by_section = {"optimizer": keywords.get("optimizer") is None, "scheduler": keywords.get("lr_scheduler") is None}
    refuse_unfilled(rewritten.config, **by_section)
    refuse_handed_on(rewritten.config, **by_section)
    _refuse_by_release({**extended, **rewritten.config})
    refuse_optimizer(keywords.get("optimizer"), rewritten.config)
    refuse_without_rate(keywords.get("optimizer"))
    refuse_unfit(keywords.get("model"), rewritten.config, groups_handed_over(keywords), handed_over(keywords))
    return rewritten


def without_keys(keywords: Mapping[str, Any], extended: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that give DeepSpeed the configuration without the extra keys, where they gave it before.

    A file that is named in `args` stays as it is: DeepSpeed passes over keys that it does not know.
    """
    # DeepSpeed takes either name, and refuses both.
    name = "config" if keywords.get("config") is not None else "config_params"
    if keywords.get(name) is None:
        return {}
    return {name: {key: value for key, value in extended.items() if key not in (PASSES, SECTION)}}


def _optimizer_of(keywords: Mapping[str, Any], extended: Mapping[str, Any]) -> str | None:
    """Return where DeepSpeed will take its optimizer from, None where there is none (0.19.8, runtime/engine.py)."""
    section = extended.get("optimizer")
    if keywords.get("optimizer"):
        return "optimizer="
    return "the section `optimizer`" if isinstance(section, Mapping) and section.get("type") else None


def _refuse_by_release(config: Mapping[str, Any]) -> None:
    here = installed()
    by_table = [] if here is None else versions.refused(config, here)
    refuse([*by_table, *unread.refused(config)])


def _refuse_without_optimizer(extended: Mapping[str, Any]) -> None:
    stage, section = Wanted(extended).stage, extended.get("optimizer")
    if isinstance(section, Mapping) and section.get("params"):
        raise ConfigError(
            f"optimizer = {dict(section)} has no type: DeepSpeed would take it for none, and train nothing; add a type "
            "such as AdamW, or remove the section of a model that is only run forward (a reference model)"
        )
    if stage in (1, 2):
        raise ConfigError(
            f"zero_optimization.stage = {stage} without an optimizer: DeepSpeed shards it there, and takes no "
            "engine without one; for a model that is only run forward (a reference model) choose stage 0 or 3, to "
            "train one give optimizer=, or a section `optimizer` with a type"
        )


def _made_together(keywords: Mapping[str, Any], everybody: Asked) -> dict[str, Any]:
    """Return what DeepSpeed calls for an optimizer or a scheduler, in a form in which no rank is left waiting by it.

    What an optimizer's function has made is compared over the ranks, as one that is given.

    Args:
        keywords: of `deepspeed.initialize`.
        everybody: the ranks, which all call it inside.
    """

    def together(members: Asked, function: Callable[..., Any], said_of: _SaidOf) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def make(*args: Any, **kwargs: Any) -> Any:
            with all_or_none(members):
                made = function(*args, **kwargs)
                said = said_of(made)
            agree(members, said)
            return made

        return make

    def of_optimizer(made: Any) -> dict[str, str]:
        refuse_without_rate(made)
        return groups_in_words(keywords.get("model"), made, getattr(made, "param_groups", ()))

    optimizer, scheduler = keywords.get("optimizer"), keywords.get("lr_scheduler")
    own = callable(optimizer) and not hasattr(optimizer, "param_groups"), callable(scheduler)
    # Ranks of other groups build engines of their own beside this one, and may give no function: they can't be told of
    # an error, because they may wait for all ranks inside DeepSpeed (ZeRO 3, stages), and hear of it when these end.
    given, found = everybody.gather(own), {}
    if members := everybody.who_all({rank: gives for rank, (gives, _) in given.items()}):
        found["optimizer"] = together(members, keywords["optimizer"], of_optimizer)
    if members := everybody.who_all({rank: gives for rank, (_, gives) in given.items()}):
        found["lr_scheduler"] = together(members, keywords["lr_scheduler"], lambda _: {})
    return found


def _forward_only(
    keywords: Mapping[str, Any], extended: Mapping[str, Any], bare: Initialize, everybody: Asked
) -> tuple[Any, Any, Any, Any]:
    # With AutoTP DeepSpeed makes an mpu of its own.
    if keywords.get("mpu") is None and autotp_size(extended) < 2:
        refuse_remembered_parts()
    whole = layers_of(keywords.get("model"), extended)
    with whole.explaining():
        returned = bare(**keywords)
    with all_or_none(everybody):
        whole.refuse_lost()
    if has_parts(returned[0]):
        refuse_mixed_parts(returned[0])
    refuse_dropped_tokens(returned[0])
    watch_forwards(returned[0])
    let_others_pass(returned[0])
    return returned


def _say_what_it_is(model: Any, level: int) -> None:
    if dist.get_rank() == 0:
        _LOG.log(
            level,
            "the engine over a %s has no optimizer (neither optimizer= nor a section `optimizer` with a type), so it "
            "is DeepSpeed's own: it runs forward, as a reference model does, counts nothing, and its backward() takes "
            "no counts; to train it, give it an optimizer",
            type(model).__name__,
        )


def _alike(rewritten: Rewrite) -> dict[str, Any]:
    # Releases reduce at other places, so that ranks of two of them would wait for each other, or add up wrongly.
    there = {"the DeepSpeed that is installed": deepspeed.__version__}
    read = {key: value for key, value in rewritten.config.items() if not is_comment(key)}
    return {**read, **_by_path(rewritten.settings), **there}


def _by_path(settings: Settings) -> dict[str, Any]:
    return {key_path(name): value for name, value in settings.model_dump().items()}


def _without_config(args: Any) -> Any:
    # DeepSpeed refuses a configuration in both places; the caller's own args stay as they are.
    if args is None:
        return None
    bare = copy.copy(args)
    for name in _BY_ARGUMENTS:
        if getattr(bare, name, None) is not None:
            setattr(bare, name, None)
    return bare


def data_parallel_size(mpu: Any, mesh_param: Any, config: dict[str, Any]) -> int:
    """Return how many ranks hold different micro-batches, as DeepSpeed counts them when it checks the batch size.

    runtime/config.py, 0.19.8, which knows nothing of AutoTP: `rewrite` does. The process group must be there.

    Raises:
        ConfigError: AutoTP or sequence parallelism can't be right as they are asked for.
    """
    if autotp_size(config) > 1:
        return ranks_apart(config, mpu, mesh_param)
    if mpu is None and not mesh_param:
        refuse_remembered()
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    sequence = sequence_parallel_size(mpu, mesh_param, config)
    if sequence > 1:
        return dist.get_world_size() // sequence
    return int(mesh_param[0]) if mesh_param else dist.get_world_size()
