"""What `--cost` of `ds-parity plan` may say: two or three numbers, or the path of a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_parity.errors import ConfigError
from ds_parity.planning import Cost
from ds_parity.planning.checks import whole

# Names of transformers, and the ones of `Cost.of_model` that they mean.
_NAMES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocabulary",
    "num_attention_heads": "heads",
}
_OPTIONAL = {"num_key_value_heads": "key_value_heads", "head_dim": "head_size"}
# A key with one of these in its name speaks of a mixture of experts.
_OF_EXPERTS = ("expert", "moe", "sparse_step", "mlp_only", "first_k_dense", "shared_intermediate_size")
# Those that are understood, where every layer has experts: Mixtral's, Phi's, OLMoE's, GPT-OSS's and Qwen's.
_UNDERSTOOD = {
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "experts_per_token",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
}


def cost_of(given: str) -> Cost:
    """Return the cost that an option says.

    Args:
        given: `PER_TOKEN,PER_SQUARE`, with `,PER_PASS` behind it or without, or the path of a config.json.

    Raises:
        ConfigError: it is neither, or the file has no sizes of a transformer, or experts of unclear width.
    """
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        return _of_file(Path(given))
    if len(numbers) not in (2, 3):
        raise ConfigError(f"--cost is {given!r}: it must be PER_TOKEN,PER_SQUARE or PER_TOKEN,PER_SQUARE,PER_PASS")
    return Cost(*numbers)


def _of_file(path: Path) -> Cost:
    try:
        config: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"--cost is {str(path)!r}: it is neither PER_TOKEN,PER_SQUARE nor a file that can be read "
            f"({error.strerror or error}); give numbers, as 24576,1, or the path of a model's config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--cost {path}: it is no JSON ({error}); give the config.json of a model") from error
    config = config if isinstance(config, dict) else {}
    # A model of images and text has the sizes of its text there.
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    missing = [name for name in _NAMES if name not in config]
    if missing:
        raise ConfigError(
            f"--cost {path}: {', '.join(missing)} is missing, which a transformer's config.json has; give numbers "
            "instead, as 24576,1"
        )
    sizes = {ours: config[name] for name, ours in _NAMES.items()}
    sizes |= {ours: config[name] for name, ours in _OPTIONAL.items() if config.get(name) is not None}
    sizes["intermediate_size"] = _entered(path, config)
    return Cost.of_model(**sizes)


def _entered(path: Path, config: dict[str, Any]) -> Any:
    """Return the width of all that a token enters: of experts there are more than that."""
    said = {name: one for name, one in config.items() if one and any(word in name for word in _OF_EXPERTS)}
    if said.get("decoder_sparse_step") == 1:  # every layer has experts
        del said["decoder_sparse_step"]
    if not said:
        return config["intermediate_size"]
    entered = whole(said.get("num_experts_per_tok"))
    width = whole(said.get("moe_intermediate_size", config["intermediate_size"]))
    shared = whole(said.get("shared_expert_intermediate_size", 0))
    if said.keys() <= _UNDERSTOOD and entered is not None and width is not None and shared is not None:
        return entered * width + shared
    raise ConfigError(
        f"--cost {path}: {', '.join(f'{name} = {one!r}' for name, one in said.items())}: how wide the experts are that "
        "a token enters is not clear from this; give PER_TOKEN,PER_SQUARE of ds_parity.Cost.of_model(...), with "
        "intermediate_size as the width of all experts that a token enters in a layer, shared ones included, and the "
        "mean of the layers where these differ"
    )
