"""Layers in whose place DeepSpeed's AutoTP puts one of its own, which has their weight and bias and nothing else.

What else a layer had is gone without a word: adapters (peft's LoRA), scales, a forward of its own, hooks. Where one of
its parameters is trained, ZeRO 1 to 3 end in a KeyError or an AttributeError (module_inject/auto_tp.py, _replace and
_replace_with_config, 0.19.8).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_parity.config.autotp import autotp_size
from ds_parity.errors import ConfigError

_OF_DEEPSPEED: Final = ("deepspeed", "ds_parity")
_PUT_IN: Final = ("deepspeed.module_inject", "torch.nn")  # a slice of an embedding is torch's own
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MATRIX: Final = 2


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module of a model before AutoTP.

    Attributes:
        module: itself.
        has: the names of its parameters and buffers.
        beside: what it does beside multiplying by its weight, in words; None for nothing.
    """

    module: torch.nn.Module
    has: frozenset[str]
    beside: str | None


@contextmanager
def refusing_to_lose_layers(model: Any, config: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which DeepSpeed builds an engine whose model loses nothing by AutoTP.

    Args:
        model: that the engine is built over; anything that is no module passes.
        config: the configuration, extended or not.

    Raises:
        ConfigError: a layer that was replaced has more than a weight and a bias. The model is changed by then.
    """
    size = autotp_size(config)
    if size < 2 or not isinstance(model, torch.nn.Module):  # of one rank nothing is divided
        yield
        return
    layers = {name: _looked_at(one) for name, one in model.named_modules()}
    try:
        yield
    except Exception as error:
        if lost := _lost(model, layers):
            raise _refusal(size, *lost) from error
        raise
    if lost := _lost(model, layers):
        raise _refusal(size, *lost)


def _refusal(size: int, name: str, layer: _Layer, what: str) -> ConfigError:
    kind = f"{type(layer.module).__module__}.{type(layer.module).__qualname__}"
    return ConfigError(
        f"tensor_parallel.autotp_size = {size}: in the place of {name} ({kind}) DeepSpeed's AutoTP puts a layer that "
        f"has its weight and bias alone, and is without {what}. Merge adapters into the layers before initialize() "
        "(merge_and_unload() of peft), leave the layer out of the plan (tensor_parallel.partition_config), or train "
        "without AutoTP. The model is changed already: build it anew"
    )


def _looked_at(module: torch.nn.Module) -> _Layer:
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return _Layer(module, frozenset(name for name, _ in named), _beside(module))


def _beside(module: torch.nn.Module) -> str | None:
    hooks = chain.from_iterable(getattr(module, name).values() for name in _HOOKS)
    of_others = [one for one in hooks if not str(getattr(one, "__module__", "")).startswith(_OF_DEEPSPEED)]
    if of_others:
        return f"its hook {getattr(of_others[0], '__qualname__', type(of_others[0]).__qualname__)}"
    return "what its own forward() does" if _is_another_function(module) else None


def _is_another_function(module: torch.nn.Module) -> bool:
    """Whether a layer with a matrix gives another thing than the product with it."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or isinstance(module, torch.nn.Embedding):
        return False
    of_transformers = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", torch.nn.Linear)
    plain = {torch.nn.Linear.forward, of_transformers.forward}
    if type(module).forward in plain and "forward" not in vars(module):
        return False
    partitioned = [one for one in module.parameters() if hasattr(one, "ds_id")]
    try:
        with GatheredParameters(partitioned) if partitioned else nullcontext(), torch.no_grad():
            return _differs(module)
    except Exception:  # it takes other inputs, of which nothing is known here
        return False


def _differs(module: Any) -> bool:
    weight, bias, trains = module.weight, getattr(module, "bias", None), module.training
    if weight.dim() != _MATRIX or not weight.is_floating_point():
        return False
    x = torch.rand((3, weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        module.train(False)
        found = module(x)
    finally:
        module.train(trains)
    due = torch.nn.functional.linear(x, weight, bias)
    return not (found.shape == due.shape and torch.allclose(found, due, rtol=1e-2, atol=1e-2))


def _lost(model: torch.nn.Module, before: Mapping[str, _Layer]) -> tuple[str, _Layer, str] | None:
    """The name of a layer that was replaced, itself, and what is gone with it; None where there is none."""
    now, found = dict(model.named_modules()), ""
    for name, layer in before.items():
        inside = bool(found) and name.startswith(f"{found}.")
        by = now.get(name)
        if inside or by is layer.module or not type(by).__module__.startswith(_PUT_IN):
            continue
        found = name
        has = _looked_at(by).has if by is not None else frozenset()
        gone = sorted(layer.has - has - {"weight", "bias"}, key=lambda one: (one.startswith("base_layer."), one))
        what = gone[0] if gone else layer.beside
        if what is not None:
            return name, layer, what
    return None
