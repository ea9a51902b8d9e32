"""Step DeepSpeed's optimizer by rollouts consumed on the whole cluster, and prove that the step is right.

The names that need torch, and the module `ds_parity.losses`, are imported when they are first used, so that
configuration, planning and traces stay light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_parity._version import __version__
from ds_parity.errors import (
    CheckpointError,
    ConfigError,
    DsParityError,
    HarnessError,
    RankDesyncError,
    TraceError,
    WindowError,
)
from ds_parity.planning import Cost, MicroBatch, Plan, PreferencePair, Rollout, by_turn, group_advantages, plan

if TYPE_CHECKING:
    from ds_parity import losses
    from ds_parity.collation import collate, labels, micro_batches, to_device
    from ds_parity.engine.engine import ParityEngine
    from ds_parity.engine.initialize import initialize
    from ds_parity.engine.install import install
    from ds_parity.engine.measuring import measure_cost
    from ds_parity.engine.pipeline import PipelinedEngine

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Cost",
    "DsParityError",
    "HarnessError",
    "MicroBatch",
    "ParityEngine",
    "PipelinedEngine",
    "Plan",
    "PreferencePair",
    "RankDesyncError",
    "Rollout",
    "TraceError",
    "WindowError",
    "__version__",
    "by_turn",
    "collate",
    "group_advantages",
    "initialize",
    "install",
    "labels",
    "losses",
    "measure_cost",
    "micro_batches",
    "plan",
    "to_device",
]

_WITH_TORCH = {
    "ParityEngine": "ds_parity.engine.engine",
    "PipelinedEngine": "ds_parity.engine.pipeline",
    "collate": "ds_parity.collation",
    "initialize": "ds_parity.engine.initialize",
    "install": "ds_parity.engine.install",
    "labels": "ds_parity.collation",
    "measure_cost": "ds_parity.engine.measuring",
    "micro_batches": "ds_parity.collation",
    "to_device": "ds_parity.collation",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("ds_parity.losses")
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'ds_parity' has no attribute {name!r}")
