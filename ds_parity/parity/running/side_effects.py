"""What a configuration writes beside training: the harness leaves it out, or it would overwrite a user's own files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def without_outputs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without DeepSpeed's monitors and without `ds_parity.trace`."""
    kept = {key: value for key, value in config.items() if key not in _MONITORS}
    section = kept.get("ds_parity")
    if isinstance(section, Mapping):
        kept["ds_parity"] = {key: value for key, value in section.items() if key != "trace"}
    return kept
