"""Models of transformers, built from a configuration with random weights: nothing is downloaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_parity.errors import ConfigError


def read_model_config(path: str) -> dict[str, Any]:
    """Return the configuration of a model, as transformers writes it.

    Args:
        path: a config.json, or the folder that contains it.

    Raises:
        ConfigError: it can't be read, is no configuration of a model, or transformers is not installed.
    """
    place = Path(path)
    place = place / "config.json" if place.is_dir() else place
    where = f"model hf:{path}"
    if not path or not place.is_file():
        raise ConfigError(f"{where}: there is no such file; give the path of a config.json: nothing is downloaded")
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: can't be read ({error}); it must be a config.json of transformers") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"{where}: it has no key model_type, so it is no configuration of a model of transformers")
    if find_spec("transformers") is None:
        raise ConfigError(f"{where}: transformers is not installed, and builds it: pip install transformers")
    return values


def build_from_config(path: str, seed: int) -> nn.Module:
    """Return the causal language model of a configuration, on the CPU in fp32, the same for a seed.

    It is in eval mode, so that dropout, which many configurations leave on, is off: with it no two runs are alike.

    Args:
        path: as `read_model_config` takes it.
        seed: of the weights.

    Raises:
        ConfigError: transformers can't build it without code or files from elsewhere.
    """
    values = read_model_config(path)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            builder: Any = AutoModelForCausalLM
            model: nn.Module = builder.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever the code of a model raises on values that do not fit together
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model hf:{path}: transformers can't build it ({type(error).__name__}: {message}); give the configuration "
            "of a causal language model that transformers knows itself"
        ) from error
    return model.eval()
