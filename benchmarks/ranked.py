"""What ranks measure: both rivals in one process, window by window in turn, so that the machine's moods cancel."""

import gc
import time

import deepspeed
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.config import rewrite
from ds_parity.parity.candidate import own_batches
from ds_parity.parity.scenario import Scenario


def _engines(scenario):
    built = []
    for initialize, config in (
        (ds_parity.initialize, scenario.config),
        (deepspeed.initialize, rewrite(scenario.config, scenario.ranks).config),
    ):
        model = scenario.build()
        built.append(initialize(model=model, model_parameters=model.parameters(), config=config)[0])
    return built


def _ours(engine, batches):
    for batch in batches:
        engine.backward(engine(**batch.inputs), rollouts=batch.rollouts, tokens=batch.tokens)
        engine.step()


def _ours_ahead(engine, batches):
    for batch in engine.passes(batches, finish=False):
        engine.backward(engine(**batch.inputs))
        engine.step()


def _by_hand(engine, batches, totals):
    """The same window as an RL trainer writes it, with counts that fell from the sky."""
    share = totals / (dist.get_world_size())
    for index, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
        loss = engine(**batch.inputs)
        engine.backward(loss / (share / batch.rollouts), scale_wrt_gas=False)
        engine.step()


def step_time(scenario, rounds):
    """Seconds a window of each rival, in turn; the order is swapped every round."""
    wanted = Scenario.from_json(scenario)
    ours, bare = _engines(wanted)
    batches = own_batches(wanted)
    totals = float(sum(batch.rollouts for held in wanted.batches() for batch in held))
    drive = _ours_ahead if wanted.settings.lookahead else _ours
    rivals = {"ours": lambda: drive(ours, batches), "by hand": lambda: _by_hand(bare, batches, totals)}
    taken = {name: [] for name in rivals}
    gc.disable()
    for number in range(rounds + 2):
        for name in list(rivals)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            rivals[name]()
            if number >= 2:
                taken[name].append(time.perf_counter() - begun)
    gc.enable()
    return taken


def memory(scenario):
    """Peak bytes allocated above the start in one window of each rival, correction included."""
    wanted = Scenario.from_json(scenario)
    ours, bare = _engines(wanted)
    batches = own_batches(wanted)
    totals = float(sum(batch.rollouts for held in wanted.batches() for batch in held))
    for _ in range(2):
        _ours(ours, batches)
        _by_hand(bare, batches, totals)
    window = ours.last_step
    return {
        "ours": _peak(lambda: _ours(ours, batches)),
        "by hand": _peak(lambda: _by_hand(bare, batches, totals)),
        "gradients": 4 * sum(p.numel() if not hasattr(p, "ds_numel") else p.ds_numel for p in ours.module.parameters()),
        "total": window.total,
    }


def _peak(run):
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
