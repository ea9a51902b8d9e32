"""What is seen of the engines of both loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import Found, Watch, policy
from tools.migrations.openrlhf.task import Critic, mean

Loss = Callable[[nn.Module, MicroBatch], Tensor]


def watched(
    engines: dict[str, Any], losses: dict[str, Loss], config: Found, trace: Path | None, probe: bool
) -> dict[str, Watch]:
    """Return a watch for each engine; the critic's trace lies beside the actor's."""
    twins = {"actor": policy, "critic": Critic}
    watches = {}
    for name, engine in engines.items():
        path = None if trace is None else trace.with_suffix(f".{name}{trace.suffix}")
        probing = {"mean": _mean(losses[name]), "twin": twins[name]()} if probe else {}
        watches[name] = Watch(engine, trace=path, config=config, **probing)
    return watches


def _mean(loss: Loss) -> Loss:
    return lambda model, batch: mean(loss(model, batch), batch)
