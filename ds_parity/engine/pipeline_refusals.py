"""What a pipeline can't do with ds_parity, which is refused before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ds_parity.config import Settings
from ds_parity.config.faults import ABSENT
from ds_parity.config.features import PIPELINES, Wanted
from ds_parity.config.refusals import writers_are_not_read
from ds_parity.engine.internals.installed import refused_by_call
from ds_parity.errors import ConfigError

_STAGES = (0, 1)


def refuse_in_pipelines(settings: Settings | None, config: Mapping[str, Any], *, plain: bool) -> None:
    """Raise ConfigError for what a pipeline can't do with ds_parity.

    Args:
        settings: the extra keys.
        config: the extended configuration.
        plain: the engine is built by `ds_parity.initialize`, and not for a framework.
    """
    assert settings is not None, "the configuration has the extra keys"
    if why := refused_by_call(PIPELINES.name):
        raise ConfigError(f"model is a PipelineModule: {why}")
    asked, timed = Wanted(config), bool(config.get("wall_clock_breakdown"))
    stage, halves = asked.stage, asked.precision == "fp16" or asked.autocast == "fp16"
    # As in a plain engine on ZeRO 1 (config/refusals.py), because bf16 on ZeRO 0 has a ZeRO optimizer's files here.
    written = asked.precision == "bf16" and asked.value("checkpoint.writer") not in (ABSENT, None)
    written = written and writers_are_not_read()
    refused = (
        (not plain, "install()", "frameworks drive passes", "call ds_parity.initialize"),
        (
            not settings.by_caller,
            "ds_parity.boundary 'rollouts'",
            "DeepSpeed's train_batch() runs all micro-batches of a step at once, so they must be known before",
            "set ds_parity.boundary to 'caller', and give each window of a plan to engine.train_window(micro_batches)",
        ),
        (stage not in _STAGES, f"zero_optimization.stage {stage}", "DeepSpeed's pipelines take 0 and 1", "choose 1"),
        (settings.terms is not None, "ds_parity.terms", "a pipeline has one loss", "add the terms up in loss_fn"),
        (settings.trace is not None, "ds_parity.trace", "no trace is written", "write engine.last_step yourself"),
        (settings.lr_progress == "rollout", "lr_progress 'rollout'", "the scheduler is DeepSpeed's", "leave it out"),
        (timed, "wall_clock_breakdown", "DeepSpeed's timers of a pipeline raise inside train_batch()", "leave it out"),
        (halves, "fp16", "its loss scale was not verified over stages", "use bf16, or fp32"),
        (written, "bf16 and checkpoint.writer", "DeepSpeed can't load what it saves", "leave checkpoint.writer out"),
    )
    for refuse, what, why, way_out in refused:
        if refuse:
            raise ConfigError(f"model is a PipelineModule, with {what}: {why}; {way_out}")


def refuse_stage_without_training(model: Any, given: Iterable[Any]) -> None:
    """Raise ConfigError where this stage trains nothing: DeepSpeed's optimizer raises there, and other stages wait.

    Args:
        model: the PipelineModule, of which this rank has a stage.
        given: the parameters that were handed over; none: those of the stage.
    """
    if not any(one.requires_grad for one in given or model.parameters() if isinstance(one, torch.Tensor)):
        raise ConfigError(
            f"stage {model.stage_id} of the pipeline trains no parameter: DeepSpeed builds an optimizer on each stage, "
            "and none without a parameter; choose a partition_method, or num_stages, by which each stage trains some"
        )
