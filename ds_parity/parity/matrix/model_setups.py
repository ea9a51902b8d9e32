"""Models that people train, and how their scripts build them: LoRA, born partitioned, mixtures of experts.

transformers and peft are extras, and are imported where a rank builds a model of theirs.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from ds_parity.parity.data.model import TinyDecoder
from ds_parity.parity.data.rollouts import VOCAB

_WIDTH, _HEADS, _INNER, _EXPERTS = 32, 4, 64, 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_ROOM = 512
_ADAPTED = ["q_proj", "v_proj", "up_proj", "down_proj"]

# Ranks that share the experts of a layer while an engine's model is built; None: plain torch, all on one process.
_APART: ContextVar[int | None] = ContextVar("apart", default=None)


# LoRA.


def lora(seed: int = 0) -> nn.Module:
    """Return a small Llama with LoRA adapters of peft on a frozen base."""
    torch.manual_seed(seed)
    return _adapted(_llama(seed))


def lora_checkpointed(seed: int = 0) -> nn.Module:
    """Return it with activation checkpointing of transformers."""
    return _checkpointed(lora(seed), reentrant=False)


def lora_reentrant(seed: int = 0) -> nn.Module:
    """Return it with activation checkpointing as TRL wants it on ZeRO 3: reentrant, over inputs that need gradients."""
    return _checkpointed(lora(seed), reentrant=True)


def adapters(module: nn.Module) -> dict[str, Any]:
    """Hand over what trains, as transformers' Trainer does."""
    return {"model_parameters": [p for p in module.parameters() if p.requires_grad]}


# Born partitioned.


def born(seed: int = 0) -> nn.Module:
    """Return a decoder whose parameters may be partitioned while its modules are made; then its weights are set."""
    model = TinyDecoder(vocab=VOCAB, width=_WIDTH, layers=1, heads=_HEADS)
    _draw(model, seed)
    return model


def pretrained(seed: int = 0) -> nn.Module:
    """Return a small Llama that was saved on this machine and loaded again by `from_pretrained`."""
    return _loaded(_llama(seed))


def pretrained_lora(seed: int = 0) -> nn.Module:
    """Return the same with LoRA adapters."""
    base = pretrained(seed)
    torch.manual_seed(seed)
    return _adapted(base)


def zero_init(config: dict[str, Any]) -> Any:
    """Let models be partitioned as they are made."""
    return deepspeed.zero.Init(config_dict_or_path=config)


@contextmanager
def hf_config(config: dict[str, Any]) -> Iterator[None]:
    """Let transformers know of ZeRO 3, as a script does that keeps an HfDeepSpeedConfig."""
    from transformers.integrations import deepspeed as integration

    untyped: Any = integration
    kept = untyped.HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del kept
        untyped.unset_hf_deepspeed_config()


# Mixtures of experts.


def mixtral(seed: int = 0) -> nn.Module:
    """Return a small Mixtral: each token enters 2 of 4 experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {**_SIZES, "num_hidden_layers": 1, "num_local_experts": _EXPERTS, "num_experts_per_tok": 2}
    # The grouped kernels take no fp64, in which the reference computes.
    sizes |= {"experts_implementation": "eager", "pad_token_id": None}
    return MixtralForCausalLM(MixtralConfig(**sizes))


class ModularExperts(nn.Module):
    """Experts of one MLP each, as mixtures keep them that DeepSpeed's leaf modules are made for.

    A token enters the best of them, times its gate's probability; an expert that no token enters runs nothing.
    """

    def __init__(self, experts: int = _EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(_mlp() for _ in range(experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the experts' answers, of the shape of `hidden` (B, T, width)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        likely = self.gate(flat).softmax(-1)
        best = likely.argmax(-1)
        answers = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            own = (best == number).nonzero().squeeze(-1)
            if len(own):
                answers = answers.index_add(0, own, expert(flat[own]) * likely[own, number, None])
        return answers.view_as(hidden)


def modular(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with experts behind its block; short micro-batches leave some of 16 experts unused."""
    return _with_experts(ModularExperts(16), seed)


def expert_groups(module: nn.Module) -> dict[str, Any]:
    """Hand over groups of what lies on every rank and of experts, as DeepSpeed's layer wants them."""
    group = {"params": list(module.parameters()), "name": "all"}
    return {"model_parameters": split_params_into_different_moe_groups_for_optimizer(group)}


@contextmanager
def experts_everywhere(_: dict[str, Any]) -> Iterator[None]:
    """Let an engine's model have DeepSpeed's MoE layer, all experts on each rank (`ep_size` 1)."""
    with _experts_apart(1):
        yield


@contextmanager
def experts_apart(_: dict[str, Any]) -> Iterator[None]:
    """Let it have half of the experts on each of two ranks (`ep_size` 2)."""
    with _experts_apart(2):
        yield


@contextmanager
def _experts_apart(size: int) -> Iterator[None]:
    before = _APART.set(size)
    try:
        yield
    finally:
        _APART.reset(before)


class LayerOfDeepSpeed(nn.Module):
    """DeepSpeed's MoE layer where an engine runs it, and in plain torch the same over the same parameters.

    Args:
        apart: ranks that share the experts (`ep_size`); None: plain torch, with all of them.
    """

    def __init__(self, apart: int | None) -> None:
        super().__init__()
        # All tokens are kept, so that none depends on the others of its micro-batch.
        options = {"k": 1, "drop_tokens": False, "min_capacity": 0, "use_rts": False}
        self.moe = MoE(_WIDTH, _mlp(), num_experts=_EXPERTS, ep_size=apart or 1, **options)
        self.apart = apart

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the experts' answers, of the shape of `hidden` (B, T, width)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.apart is not None:
            # Ranks that share experts exchange rows of one number, whatever each has (moe/sharded_moe.py, capacity).
            room = _ROOM if self.apart > 1 else len(flat)
            answers: Tensor = self.moe(F.pad(flat, (0, 0, 0, room - len(flat))))[0]
            return answers[: len(flat)].view_as(hidden)
        inner = self.moe.deepspeed_moe
        likely = inner.gate.wg(flat).softmax(-1)
        best = likely.argmax(-1)
        every = torch.stack([expert(flat) for expert in inner.experts.deepspeed_experts], 1)
        rows = torch.arange(len(flat), device=flat.device)
        chosen: Tensor = every[rows, best] * likely[rows, best, None]
        return chosen.view_as(hidden)


def deepspeed_moe(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with DeepSpeed's MoE layer behind its block, or its counterpart in plain torch."""
    apart = _APART.get()
    return _with_experts(LayerOfDeepSpeed(apart), seed, apart or 1)


class _Behind(nn.Module):
    """A block of the decoder, and what is added to the stream behind it."""

    def __init__(self, block: nn.Module, added: nn.Module) -> None:
        super().__init__()
        self.block, self.added = block, added

    def forward(self, *inputs: Tensor) -> Tensor:
        hidden = self.block(*inputs)
        return hidden + self.added(hidden)  # type: ignore[no-any-return]  # modules are untyped callables


def _with_experts(experts: nn.Module, seed: int, apart: int = 1) -> nn.Module:
    model = TinyDecoder(vocab=VOCAB, width=_WIDTH, layers=1, heads=_HEADS)
    model.blocks = nn.ModuleList(_Behind(block, experts) for block in model.blocks)
    _draw(model, seed, apart)
    return model


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _INNER), nn.GELU(), nn.Linear(_INNER, _WIDTH))


def _draw(model: nn.Module, seed: int, apart: int = 1) -> None:
    """Set every weight from its name and the seed, whatever part of the model lies here.

    Args:
        model: as it was made, partitioned or not.
        seed: of the weights.
        apart: ranks that share the experts of DeepSpeed's layers.
    """
    first = _EXPERTS // apart * (deepspeed.comm.get_rank() % apart) if apart > 1 else 0
    with torch.no_grad():
        for name, one in model.named_parameters():
            with deepspeed.zero.GatheredParameters([one], modifier_rank=0, enabled=hasattr(one, "ds_id")):
                one.copy_(_drawn(_whole_name(name, first), one.shape, seed))


def _whole_name(name: str, first: int) -> str:
    """Return the name that a parameter has where all experts lie on one rank."""
    before, found, behind = name.partition("deepspeed_experts.")
    if not found:
        return name
    number, _, rest = behind.partition(".")
    return f"{before}{found}{int(number) + first}.{rest}"


def _drawn(name: str, shape: torch.Size, seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
    # By numpy: zero.Init rounds what torch draws, and it would be rounded once more. (A text's own hash differs from
    # process to process.)
    generator = np.random.default_rng([seed, *name.encode()])
    std = 1.0 if name == "embedding.weight" else 1 / math.sqrt(shape[1])
    return torch.from_numpy((generator.standard_normal(tuple(shape)) * std).astype(np.float32))


def _llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, pad_token_id=None))


def _loaded(model: Any) -> nn.Module:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        # Each rank has a folder of its own; on ZeRO 3, save_pretrained() writes weights on the first rank alone.
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        loaded: nn.Module = type(model).from_pretrained(folder, dtype=torch.float32)
    return loaded


def _adapted(base: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=_ADAPTED, task_type="CAUSAL_LM"))


def _checkpointed(model: Any, *, reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    # A reentrant checkpoint runs no backward where none of its inputs needs a gradient, and the base is frozen.
    model.enable_input_require_grads()
    trained: nn.Module = model.train()
    return trained
