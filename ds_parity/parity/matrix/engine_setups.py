"""Models that AutoTP divides, and what a loop calls of an engine beside its passes: compile, offload_states."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import VOCAB

_HEADS = 4
# Weights of a usual start (0.02) would leave most of a small model's gradient to its last layer.
_STD = 0.2


def llama(seed: int = 0) -> nn.Module:
    """Return a small Llama of transformers, which AutoTP divides by its plan, on up to 4 ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _drawn(LlamaForCausalLM, LlamaConfig(**_small()), seed)


def qwen3(seed: int = 0) -> nn.Module:
    """Return a small Qwen 3: its norms of heads are whole on every rank, and their gradients are not."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _drawn(Qwen3ForCausalLM, Qwen3Config(**_small(), head_dim=8), seed)


def _small() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "initializer_range": _STD,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }


def _drawn(kind: Any, config: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model: nn.Module = kind(config)
    return model.float().eval()


def compiled_by_torch(seed: int = 0) -> nn.Module:
    """Return the tiny decoder as `torch.compile` gives it; its backend traces the backward, and runs what it traced."""
    return torch.compile(build_tiny(seed), backend="aot_eager")  # type: ignore[return-value]


def compile_eagerly(engine: Any) -> None:
    """Compile an engine's model with a backend that runs what it has traced."""
    engine.compile(backend="eager")


def compile_both_ways(engine: Any) -> None:
    """Compile an engine's model with a backend that traces the backward, too."""
    engine.compile(backend="aot_eager")


def compile_to_code(engine: Any) -> None:
    """Compile an engine's model to machine code, once for every shape."""
    engine.compile(backend="inductor", compile_kwargs={"dynamic": True})


def away_and_back(engine: Any) -> None:
    """Move an engine's states off the accelerator and back, as around the sampling of rollouts."""
    engine.offload_states(pin_memory=_can_pin(engine))
    engine.reload_states()


def away_unpinned(engine: Any) -> None:
    """The same without pinned memory."""
    engine.offload_states(pin_memory=False)
    engine.reload_states()


def _can_pin(engine: Any) -> bool:
    # Before 0.19.8, DeepSpeed asks torch to pin memory, and torch does so for an accelerator only.
    if torch.accelerator.is_available() or not hasattr(engine.optimizer, "offload_states"):
        return True
    return "pin_memory()" not in inspect.getsource(type(engine.optimizer).offload_states)
