"""Step DeepSpeed's optimizer by rollouts consumed on the whole cluster, and prove that the step is right.

The names that need torch are imported when they are first used, so that configuration, planning and traces stay light.
"""

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
from ds_parity.planning import MicroBatch, Plan, Rollout, plan

if TYPE_CHECKING:
    from ds_parity.engine.engine import ParityEngine
    from ds_parity.engine.initialize import initialize

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DsParityError",
    "HarnessError",
    "MicroBatch",
    "ParityEngine",
    "Plan",
    "RankDesyncError",
    "Rollout",
    "TraceError",
    "WindowError",
    "__version__",
    "initialize",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "initialize":
        from ds_parity.engine.initialize import initialize

        return initialize
    if name == "ParityEngine":
        from ds_parity.engine.engine import ParityEngine

        return ParityEngine
    raise AttributeError(f"module 'ds_parity' has no attribute {name!r}")
