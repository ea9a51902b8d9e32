"""Backwards that pass through what an engine has returned, and bring its own parameters no gradient.

`torch.autograd.grad` is one (adversarial inputs, a gradient penalty, GradNorm), and so is the backward of another
engine whose loss comes through this one's outputs (a frozen discriminator or reward model). DeepSpeed takes any that it
has not begun itself for a step of training: it divides what flows through by gradient_accumulation_steps
(_backward_prologue_per_tensor), raises on ZeRO 0, and reduces what is not there on ZeRO 2 (_backward_prologue and
_backward_post_hook of runtime/engine.py, 0.18.4 to 0.19.8; tools/deepspeed_faults/gradient_read_scaled.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_parity.engine.internals.surface import Engine, Parameter


def let_others_pass(engine: Engine) -> None:
    """Let a backward pass as it is, if it brings none of the engine's parameters a gradient.

    Args:
        engine: a bare DeepSpeed engine; it may have no optimizer, and only run forward.
    """
    begin = engine._backward_prologue

    def begin_unless_passing() -> None:
        if engine._running_engine_backward or _brings_a_gradient(engine.module.parameters()):
            begin()

    def as_it_is(grad: torch.Tensor) -> torch.Tensor:
        # DeepSpeed's own leaves the gradients of engine.backward() alone, too: its loss has been divided.
        return grad

    engine._backward_prologue = begin_unless_passing  # type: ignore[method-assign]
    engine._backward_prologue_per_tensor = as_it_is  # type: ignore[method-assign]


def _brings_a_gradient(parameters: Iterable[Parameter]) -> bool:
    """Return whether the backward that runs just now accumulates a gradient of one of these."""
    return any(_is_accumulated(one) for one in parameters if one.requires_grad)


def _is_accumulated(parameter: Parameter) -> bool:
    with torch.enable_grad():
        through = parameter.expand_as(parameter).grad_fn
    # Inside torch.func.grad and its like nothing is accumulated, and nothing has a function.
    accumulates = None if through is None else through.next_functions[0][0]
    if accumulates is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulates))
    except RuntimeError:  # torch.autograd.grad returns it, and accumulates nothing
        return False
