"""What a step holds beside DeepSpeed's own, and what it would hold with a copy of the gradients; see test_peaks.py."""

from itertools import product

import cells
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_parity.parity.running.tasks import attempt_scenario

TASKS = ["peaks"]
CASES = [*product(cells.STAGES, cells.DTYPES)]


def peaks(folder):
    """By stage and precision: ours, the engine driven by hand, and ours with a copy that lives during the step."""
    return {name(*case): _peaks(cells.ragged(*case, "token").to_json(), str(folder)) for case in CASES}


def name(stage, dtype):
    """What a case is found by."""
    return f"{stage}-{dtype}"


def _peaks(scenario, folder):
    found = {
        engine: attempt_scenario(scenario, engine, folder, measured=True) for engine in ("ds_parity", "deepspeed-loop")
    }
    unwatched = DeepSpeedEngine._take_model_step
    DeepSpeedEngine._take_model_step = _copying
    try:
        found["copying"] = attempt_scenario(scenario, "ds_parity", folder, measured=True)
    finally:
        DeepSpeedEngine._take_model_step = unwatched
    return found


def _copying(engine, *args, _step=DeepSpeedEngine._take_model_step, **kwargs):
    held = getattr(engine.optimizer, "averaged_gradients", None) or {}
    copy = [gradient.clone() for group in held.values() for gradient in group or []]
    copy += [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]
    assert sum(gradient.numel() for gradient in copy) > 10_000
    return _step(engine, *args, **kwargs)
