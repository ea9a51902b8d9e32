"""The engine under test: a scenario run through `ds_parity.initialize`, as a user's loop would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import ds_parity
from ds_parity.engine.record.finished import Finished
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.own_batches import Record, own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import ulysses
from ds_parity.planning.rollout import MicroBatch


def run(scenario: Scenario, record: Record, config: dict[str, Any] | None = None) -> Any:
    """Run the scenario and hand every finished step to `record`; returns the engine.

    Args:
        scenario: what to run.
        record: called with every step and the module.
        config: another configuration for the engine alone; the model and its loss stay the scenario's.
    """
    module, mpu = ulysses.placed(scenario)
    engine, *_ = ds_parity.initialize(
        model=module, config=config or scenario.config, mpu=mpu, **scenario.keywords(module)
    )
    if scenario.train is not None:
        return _trained(engine, scenario, record)
    drive = _by_passes if scenario.drive == "passes" else _by_counts
    for _ in drive(engine, scenario):
        _note(engine, record)
    engine.finish()
    _note(engine, record)
    return engine


def _trained(engine: Any, scenario: Scenario, record: Record) -> Any:
    # Each step is recorded as it is settled: the function returns only at the end, and its metrics are its own. The
    # driver is private to ds_parity's engine, which offers users `last_step` instead.
    def note(finished: Finished) -> None:
        record(finished.record.model_copy(update={"metrics": {}}), engine.module)

    engine._self_driver.boundary.on_step.append(note)
    resolve(scenario.train or "")(engine, engine.passes(_stream(scenario), idle=stand_in(scenario)))
    return engine


def _stream(scenario: Scenario) -> list[MicroBatch]:
    # Some scenarios say where idle passes are; in the others, ranks just run out of data.
    idle_included = scenario.shape == "planned" or scenario.drive == "loop"
    return [batch for batch in own_batches(scenario) if idle_included or not batch.idle]


def _by_counts(engine: Any, scenario: Scenario) -> Iterator[None]:
    idle = stand_in(scenario)
    for batch in own_batches(scenario):
        if not batch.idle:
            loss = engine(**batch.inputs)
            _measure(engine, batch)
            engine.backward(loss, rollouts=batch.rollouts, prompts=batch.prompts, tokens=batch.tokens)
        else:
            engine.idle(engine(**idle.inputs))
        engine.step()
        yield


def _by_passes(engine: Any, scenario: Scenario) -> Iterator[None]:
    for batch in engine.passes(_stream(scenario), idle=stand_in(scenario), finish=False):
        loss = engine(**batch.inputs)
        _measure(engine, batch)
        engine.backward(loss)
        engine.step()
        yield


def _measure(engine: Any, batch: MicroBatch) -> None:
    engine.record(
        "reward", torch.tensor([rollout.reward for unit in batch.held for rollout in unit.sequences], device="cpu")
    )


def _note(engine: Any, record: Record) -> None:
    step = engine.last_step if engine.window.passes == 0 else None
    if step is not None and step.step != getattr(record, "noted", 0):
        record.noted = step.step  # type: ignore[attr-defined]
        record(step, engine.module)
