"""The model of a scenario by its name: a user's function, a bundled decoder, or one of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_parity.errors import ConfigError
from ds_parity.parity.data.hugging_face import build_from_config, read_model_config
from ds_parity.parity.data.tokenizing import tokens_of
from ds_parity.parity.running.functions import refuse_unknown, resolve

FROM_CONFIG = "hf:"
_BUNDLED = "ds_parity.parity.data.model:"


def refuse_unknown_model(name: str, folders: Sequence[str] = ()) -> None:
    """Refuse a model that no rank could build, before any rank is started.

    Args:
        name: `package.module:function`, or `hf:` and the path of a config.json.
        folders: as `refuse_unknown` takes them.

    Raises:
        ConfigError: there is no such package or file.
    """
    if name.startswith(FROM_CONFIG):
        read_model_config(name.removeprefix(FROM_CONFIG))
    else:
        refuse_unknown(name, folders)


def build_policy(name: str, seed: int, tokenizer: str | None = None) -> nn.Module:
    """Return a model from token ids to logits.

    Args:
        name: as `refuse_unknown_model` takes it.
        seed: of its weights.
        tokenizer: of the rollouts; a bundled decoder gets as many token ids as it has.

    Raises:
        ConfigError: there is none of that name, or it is no module.
    """
    if name.startswith(FROM_CONFIG):
        return build_from_config(name.removeprefix(FROM_CONFIG), seed)
    own = {"vocab": tokens_of(tokenizer).size} if tokenizer and name.startswith(_BUNDLED) else {}
    policy = resolve(name)(seed, **own)
    if not isinstance(policy, nn.Module):
        raise ConfigError(f"model {name!r} returned {type(policy).__name__}: it must return a torch nn.Module")
    return policy
