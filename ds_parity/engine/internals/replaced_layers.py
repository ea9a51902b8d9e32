"""Layers in whose place DeepSpeed's AutoTP puts one of its own, which has their weight and bias and nothing else.

What else a layer had is gone without a word: adapters (peft's LoRA), scales, a forward of its own, hooks. Where one of
its parameters is trained, ZeRO 1 to 3 end in a KeyError or an AttributeError (module_inject/auto_tp.py, _replace and
_replace_with_config, 0.19.8).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch

from ds_parity.config.autotp import AUTOTP, autotp_size
from ds_parity.errors import ConfigError

_OF_DEEPSPEED: Final = ("deepspeed", "ds_parity")
_PUT_IN: Final = ("deepspeed.module_inject", "torch.nn")  # a slice of an embedding is torch's own
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_COMPILED: Final = "_orig_mod"  # torch.compile's name for what it wraps
_MATRIX: Final = 2
# Shares of the largest of some products, by which sums of 4,096 and more differ in another order: in fp32, in the fewer
# digits that GPUs may multiply fp32 with, and of operands that are rounded to bf16.
_SINGLE: Final = 1e-4
_FEWER_DIGITS: Final = 1e-3
_HALF: Final = 2e-2
_SAME: Final = 1e-6  # of sums of integers
_FEW: Final = 64  # weights of an output that are not 0, there
_HALVES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module of a model before AutoTP.

    Attributes:
        module: itself.
        has: the names of its parameters and buffers.
        shape: of its weight; () without one.
    """

    module: torch.nn.Module
    has: frozenset[str]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholeLayers:
    """The layers of a model before DeepSpeed builds an engine over it, which may divide some by AutoTP.

    Attributes:
        model: that the engine is built over.
        size: of AutoTP's groups; 1 without it.
        layers: by their names; none without AutoTP.
    """

    model: Any
    size: int
    layers: Mapping[str, _Layer] = field(repr=False)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Return a context in which an error that comes of a layer that has lost something is explained so.

        Raises:
            ConfigError: as `refuse_lost` does.
        """
        try:
            yield
        except Exception as error:
            try:
                self.refuse_lost()
            except ConfigError as lost:
                raise lost from error
            raise

    def refuse_lost(self) -> None:
        """Raise ConfigError where a layer was replaced that has more than a weight and a bias; the model is changed."""
        lost = self._lost()
        if lost is None:
            return
        name, module, what = lost
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise ConfigError(
            f"{AUTOTP} = {self.size}: in the place of {name} ({kind}) DeepSpeed's AutoTP puts a layer that has its "
            f"weight and bias alone, and is without {what}. Merge adapters into the layers before initialize() "
            "(merge_and_unload() of peft), leave the layer out of the plan (tensor_parallel.partition_config), or "
            "train without AutoTP. The model is changed already: build it anew"
        )

    def _lost(self) -> tuple[str, torch.nn.Module, str] | None:
        """The name of a layer that was replaced, itself, and what is gone with it; None where there is none."""
        now = dict(self.model.named_modules(remove_duplicate=False)) if self.layers else {}
        found: str | None = None
        for name, layer in self.layers.items():
            by = now.get(name)
            inside = found is not None and name.startswith(f"{found}.")
            if inside or by is layer.module or not type(by).__module__.startswith(_PUT_IN):
                continue
            found = name
            has = frozenset() if by is None else _names(by)
            gone = sorted(layer.has - has - {"weight", "bias"}, key=lambda one: (one.startswith("base_layer."), one))
            what = gone[0] if gone else _beside(layer, by)
            if what is not None:
                return name, layer.module, what
        return None


def layers_of(model: Any, config: Mapping[str, Any]) -> WholeLayers:
    """Return the layers of a model as they are before AutoTP.

    Args:
        model: that an engine is built over; anything that is no module has none.
        config: the configuration, extended or not.
    """
    size = autotp_size(config)
    if size == 1 or not isinstance(model, torch.nn.Module):
        return WholeLayers(model, size, {})
    named = model.named_modules(remove_duplicate=False)
    return WholeLayers(model, size, {name: _Layer(one, _names(one), _shape(one)) for name, one in named})


def _uncompiled(module: Any) -> Any:
    return getattr(module, _COMPILED, module)


def _names(module: torch.nn.Module) -> frozenset[str]:
    inner = _uncompiled(module)
    named = chain(inner.named_parameters(remove_duplicate=False), inner.named_buffers(remove_duplicate=False))
    return frozenset(name for name, _ in named)


def _shape(module: torch.nn.Module) -> tuple[int, ...]:
    # Asked for by its name, the weight of a parametrized layer would be computed anew, and some draw random numbers.
    weight = _uncompiled(module)._parameters.get("weight")
    return tuple(getattr(weight, "ds_shape", weight.shape)) if isinstance(weight, torch.Tensor) else ()


def _beside(layer: _Layer, by: Any) -> str | None:
    """What a layer does beside multiplying by its weight, in words; None for nothing; `by` stands in its place."""
    both = dict.fromkeys((layer.module, _uncompiled(layer.module)))
    hooks = chain.from_iterable(getattr(one, name).values() for one in both for name in _HOOKS)
    of_others = [one for one in hooks if not str(getattr(one, "__module__", "")).startswith(_OF_DEEPSPEED)]
    if of_others:
        return f"its hook {getattr(of_others[0], '__qualname__', type(of_others[0]).__qualname__)}"
    if not _is_another_function(_uncompiled(layer.module), layer.shape, _precision(by)):
        return None
    return "what its own forward() does"


def _precision(module: Any) -> float:
    """The share of the largest product by which two ways to compute it differ, in the type of a layer's weight."""
    weight, multiplied = getattr(module, "weight", None), torch.get_float32_matmul_precision()
    if multiplied == "medium" or (isinstance(weight, torch.Tensor) and weight.dtype in _HALVES):
        return _HALF
    return _SINGLE if multiplied == "highest" else _FEWER_DIGITS


def _is_another_function(module: Any, shape: tuple[int, ...], precision: float) -> bool:
    """Whether a layer that was replaced gives another thing than the product with its weight, but for rounding."""
    of_transformers = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", torch.nn.Linear)
    plain = {torch.nn.Linear.forward, torch.nn.Embedding.forward, of_transformers.forward}
    if (type(module).forward in plain and "forward" not in vars(module)) or len(shape) != _MATRIX:
        return False
    return _differs(module, _drawn(shape), precision) or _differs(module, _exact(shape), _SAME)


def _drawn(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return a weight, inputs and a bias of any digits, whose products are as large as inputs and biases."""
    weight, x, bias = _normal(shape, (2, 3, shape[1]), shape[:1])
    return weight / shape[1] ** 0.5, x, bias


def _exact(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the same, with sums that are exact in any order and dtype, as all of their parts have 8 digits in binary.

    So no tolerance is needed in which a small addition could hide, or a bound that only large products reach. Every
    other output sums small integers, the first one up to 128 if there are inputs enough, and a bias adds 99 at most.
    The ones between are a single weight.
    """
    outputs, inputs = shape
    few = min(_FEW, inputs)
    held, x, bias = _normal((outputs, few), (2, 3, inputs), (outputs,))
    number, count = torch.arange(outputs, device="cpu")[:, None], torch.arange(few, device="cpu")
    places, signs = (number * 7 + count) % inputs, x.sign()
    sums = held.sign() * (1 + (held.abs() > 1))
    sums[0] = 2 * signs[0, 0, places[0]]
    alone = held.sign() * (1 + (number * 37 % 128).float() / 128) * (count == 0)
    odd = number % 2 == 1
    weight = torch.zeros(shape, dtype=torch.float32, device="cpu").scatter_(1, places, torch.where(odd, alone, sums))
    return weight, signs, torch.where(odd[:, 0], 0.0, (bias * _FEW).round().clamp(-99, 99))


def _normal(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes]


def _differs(module: Any, drawn: tuple[torch.Tensor, ...], precision: float) -> bool:
    """Whether what a layer gives differs, by more than a share of the largest product; not where it raises."""
    weight, x, shift = (one.to(module.weight.device) for one in drawn)
    bias = None if getattr(module, "bias", None) is None else shift
    # All that it has is a copy meanwhile, and the caller's random numbers go on from where they were.
    own = {name: one.detach().clone() for name, one in module.named_buffers()} | {"weight": weight}
    own |= {} if bias is None else {"bias": bias}
    try:
        with torch.random.fork_rng(), torch.no_grad():
            found = torch.func.functional_call(module, own, (x,))
        due = torch.nn.functional.linear(x, weight, bias)
        return not (found.shape == due.shape and bool((found - due).abs().max() <= precision * due.abs().max()))
    except Exception:  # it takes other inputs, of which nothing is known here
        return False
