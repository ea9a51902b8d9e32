"""The engine under test: a scenario run through `ds_parity.initialize`, as a user's loop would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import ds_parity
from ds_parity.engine.record.finished import Finished
from ds_parity.parity.running.functions import run_loop
from ds_parity.parity.running.layouts import of_one_unit
from ds_parity.parity.running.own_batches import Record, after_building, after_window, begin, own_batches, stand_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects import ulysses
from ds_parity.parity.subjects.oracle import PlannedWindow, given_share, weights_of_terms, windows_of
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
    begin(record, engine.module)
    after_building(scenario, engine)
    if scenario.train is not None:
        return _trained(engine, scenario, record)
    drive = _ending_windows if scenario.settings.by_caller else _BY_DRIVE[scenario.drive]
    for _ in drive(engine, scenario):
        if _note(engine, record):
            after_window(scenario, engine)
    engine.finish()
    _note(engine, record)
    return engine


def _trained(engine: Any, scenario: Scenario, record: Record) -> Any:
    # Each step is recorded as it is settled: the function returns only at the end, and its metrics are its own. The
    # driver is private to ds_parity's engine, which offers users `last_step` instead.
    def note(finished: Finished) -> None:
        record(finished.record.model_copy(update={"metrics": {}}), engine.module)

    engine._self_driver.boundary.on_step.append(note)
    run_loop(scenario.train or "", engine, engine.passes(_stream(scenario), idle=stand_in(scenario)))
    return engine


def _stream(scenario: Scenario) -> list[MicroBatch]:
    # Some scenarios say where idle passes are; in the others, ranks just run out of data.
    idle_included = scenario.shape == "planned" or scenario.drive == "loop"
    return [batch for batch in own_batches(scenario) if idle_included or not batch.idle]


def _by_counts(engine: Any, scenario: Scenario) -> Iterator[None]:
    for _ in _counted(engine, scenario):
        engine.step()
        yield


def _by_passes(engine: Any, scenario: Scenario) -> Iterator[None]:
    for _ in _handed_out(engine, scenario):
        engine.step()
        yield


_BY_DRIVE = {"loop": _by_counts, "passes": _by_passes}


def _ending_windows(engine: Any, scenario: Scenario) -> Iterator[None]:
    """Call step() where a window ends, and nowhere else; the one that the data ends in is left to finish()."""
    ends = {window.last for window in windows_of(scenario.batches(), scenario.settings) if not window.open}
    run = _handed_out if scenario.drive == "passes" else _counted
    for index in run(engine, scenario):
        if index in ends:
            engine.step()
            yield


def _counted(engine: Any, scenario: Scenario) -> Iterator[int]:
    """Run one backward after another with its counts, and yield the pass that it was."""
    idle, own = stand_in(scenario), own_batches(scenario)
    windows = _by_pass(scenario)
    for index, batch in enumerate(own):
        if index == windows[index].first:
            _expect(engine, scenario, own[index : windows[index].last + 1])
        if scenario.drive == "announced":
            engine.set_gradient_accumulation_boundary(index == windows[index].last)
        if not batch.idle:
            loss = _divided(engine(**batch.inputs), batch, windows[index])
            _measure(engine, batch)
            weight = {} if batch.weight is None else {"weight": batch.weight}
            engine.backward(loss, rollouts=batch.rollouts, prompts=batch.prompts, tokens=batch.tokens, **weight)
            del loss  # its graph lives as long
        elif scenario.drive != "uneven":
            engine.idle(engine(**idle.inputs))
        yield index


def _expect(engine: Any, scenario: Scenario, coming: list[MicroBatch]) -> None:
    """Say what this rank's next window will contain, where its totals must be known before its first backward."""
    settings = scenario.settings
    if settings.terms is None or of_one_unit(settings):
        return
    weights = [weights_of_terms(batch, settings) for batch in coming]
    own = [name for name, term in settings.terms.items() if term.weight == "weight"]
    engine.expect(
        rollouts=sum(batch.rollouts for batch in coming),
        tokens=sum(batch.tokens for batch in coming),
        passes=sum(not batch.idle for batch in coming),
        weight={name: sum(one[name] for one in weights) for name in own},
    )


def _handed_out(engine: Any, scenario: Scenario) -> Iterator[int]:
    """The same with what `passes()` hands out, counting the passes that it does."""
    own = own_batches(scenario)
    windows = iter([window for batch, window in zip(own, _by_pass(scenario), strict=True) if not batch.idle])
    # Where losses are divided by what was read, the end of the stream must be the end of its window.
    finish = scenario.settings.lookahead == "window"
    for index, batch in enumerate(engine.passes(_stream(scenario), idle=stand_in(scenario), finish=finish)):
        loss = engine(**batch.inputs)
        if not batch.idle:
            loss = _divided(loss, batch, next(windows))
        _measure(engine, batch)
        engine.backward(loss)
        del loss  # its graph lives as long
        yield index


def _by_pass(scenario: Scenario) -> list[PlannedWindow]:
    windows = windows_of(scenario.batches(), scenario.settings)
    return [window for window in windows for _ in range(window.first, window.last + 1)]


def _divided(loss: Any, batch: MicroBatch, window: PlannedWindow) -> Any:
    return loss if window.divided_by is None else loss * given_share(batch, window)


def _measure(engine: Any, batch: MicroBatch) -> None:
    rewards = [rollout.reward for unit in batch.held for rollout in unit.sequences]
    engine.record("reward", torch.tensor(rewards, dtype=torch.float64, device="cpu"))


def _note(engine: Any, record: Record) -> bool:
    """Hand over the step that has just been taken; False where there is none."""
    step = engine.last_step if engine.window.passes == 0 else None
    if step is None or step.step == getattr(record, "noted", 0):
        return False
    record.noted = step.step  # type: ignore[attr-defined]
    record(step, engine.module)
    return True
