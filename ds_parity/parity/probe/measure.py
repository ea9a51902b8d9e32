"""The probe, the X-ray of one step: with what coefficient did each micro-batch really enter it?

Every micro-batch's own gradient is computed apart in plain torch. One window is run through the engine with SGD; its
update is then written as a sum of those gradients (least squares), and the coefficients are compared with
w[r,i] / total. It works on any engine and loop, and needs no tolerance to speak of.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_parity.config import Settings
from ds_parity.errors import ConfigError
from ds_parity.parity.probe.decomposition import decompose
from ds_parity.parity.probe.probed_data import first_window
from ds_parity.parity.running import half_precision, weights
from ds_parity.parity.running.functions import resolve
from ds_parity.parity.running.own_batches import own_batches
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import weight, weights_of_terms
from ds_parity.planning.rollout import MicroBatch

# A step long enough that the update, not the weights, fills the digits of a bf16 weight.
_RATE = {"fp32": 1.0, "bf16": 1024.0, "fp16": 1024.0}


def probe_scenario(scenario: dict[str, Any], subject: str) -> dict[str, Any]:
    """Run one window of a scenario and decompose its update; called on every rank.

    Args:
        scenario: its first window is probed; its optimizer is replaced by SGD, clipping and scheduler are left out.
        subject: `package.module:function(scenario, record)` that runs it, as the engines of a comparison do.

    Returns:
        A `ProbeResult` as plain values, the same on every rank.
    """
    wanted = prepared(Scenario.from_json(scenario))
    shares = first_window(wanted)
    start, gradients = _gradients(wanted, len(shares))
    update = _update(wanted, start, subject)
    expected = [[share for own in row for share in own] for row in shares]
    return asdict(decompose(update, gradients, expected, tuple(wanted.settings.terms or ()), wanted.dtype))


def prepared(scenario: Scenario) -> Scenario:
    """Return the scenario with plain SGD and nothing else that shapes the update."""
    config = copy.deepcopy(scenario.config)
    config.pop("scheduler", None)
    config["optimizer"] = {"type": "SGD", "params": {"lr": _RATE[scenario.storage]}}
    config["gradient_clipping"] = 0.0
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    # A second window leaves room for the first to overshoot.
    return Scenario.from_json({**scenario.to_json(), "config": config, "windows": 2})


def _gradients(scenario: Scenario, passes: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return the initial weights, and every micro-batch's gradient as it would be alone, rank by rank within a pass."""
    model = scenario.build()
    scenario.keywords(model)  # it may freeze parameters
    model = {"bf16": model.bfloat16, "fp16": model.half}.get(scenario.storage, model.float)().float()
    start = weights.vector(model)
    own = [_gradients_of(batch, model, scenario.settings) for batch in own_batches(scenario)[:passes]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, np.stack(own))
    return start, np.stack(everyone[:: scenario.sharing], axis=1).reshape(-1, len(start))


def _gradients_of(batch: MicroBatch, model: torch.nn.Module, settings: Settings) -> np.ndarray:
    """Return (terms, P): the gradient of a micro-batch's own mean loss, or of each term of it times its coefficient."""
    size = sum(p.numel() for p in model.parameters())
    if settings.terms is None:
        shares = {"": (1.0, weight(batch, settings.loss_weight))}
    else:
        weights = weights_of_terms(batch, settings)
        shares = {name: (term.coefficient, weights[name]) for name, term in settings.terms.items()}
    if not batch.rollouts:
        return np.zeros((len(shares), size))
    losses = model(**{name: value.cpu() for name, value in batch.inputs.items()})
    gradients = []
    for name, (times, units) in shares.items():
        model.zero_grad()
        (losses[name] if name else losses).backward(retain_graph=True)
        gradient = torch.cat([_of(p) for p in model.parameters()]).double().numpy() * times
        # What a term does not weigh may be anything, and a sum of nothing has no mean.
        summed = settings.loss_reduction == "sum"
        gradients.append(gradient / units if summed and units else gradient)
    return np.stack(gradients)


def _of(parameter: torch.nn.Parameter) -> torch.Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def _update(scenario: Scenario, start: torch.Tensor, subject: str) -> np.ndarray:
    run = resolve(subject)
    after: list[torch.Tensor] = []

    def record(_: Any, module: torch.nn.Module) -> None:
        after.append(weights.vector(module))

    with half_precision.experiment():
        engine = run(scenario, record)
        _refuse_unfit(subject, engine, bool(after))
        engine.destroy()
    rate = scenario.config["optimizer"]["params"]["lr"]
    update: np.ndarray = ((start.double() - after[0].double()) / rate).numpy()
    return update


def _refuse_unfit(subject: str, engine: Any, recorded: bool) -> None:
    """Refuse a subject that did not run the scenario, or does not say what came of it."""
    must = "it must run the scenario, call record(step, module) behind each optimizer step, and return its engine"
    rank = dist.get_rank()
    if not callable(getattr(engine, "destroy", None)):
        raise ConfigError(
            f"subject {subject!r} returned {engine!r:.60} on rank {rank}, which is no engine (it has no destroy()): "
            f"{must}"
        )
    if not recorded:
        raise ConfigError(f"subject {subject!r} never called record on rank {rank}: {must}")
