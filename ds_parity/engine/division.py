"""One backward: the loss is divided as it goes in, or silenced where it counts for nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from ds_parity.engine.internals.base import Adapter
from ds_parity.engine.internals.reached_twice import explain
from ds_parity.engine.record.metrics import Meter
from ds_parity.window import Counts, Weighting, Window

_LOG = logging.getLogger("ds_parity")
Loss: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor]
"""A loss, or its terms by their names."""
_HALVES = (torch.bfloat16, torch.float16)


class Division:
    """Divides losses by the expected total of their window, and hands them to DeepSpeed's backward.

    Args:
        adapter: of the engine's optimizer wrapper.
        meter: where the window's loss is summed.
        ranks: data-parallel ranks (>= 1).
        peers: ranks that share a micro-batch and whose gradients DeepSpeed adds up, 1 without sequence parallelism.
    """

    def __init__(self, adapter: Adapter, meter: Meter, ranks: int, peers: int) -> None:
        self._adapter = adapter
        self._engine = adapter.engine
        self._meter = meter
        self._averaged_over = adapter.averaged_over(ranks, peers)
        self._peers = peers
        self._warned = False

    def backward(self, loss: Loss, counts: Counts, weighting: Weighting, window: Window, **kwargs: Any) -> torch.Tensor:
        """Run one backward; return the loss as it was accumulated.

        Args:
            loss: scalar, or the terms of the loss by their names.
            counts: what the micro-batch contains.
            weighting: of the window.
            window: the open window; its `expected` total, which losses are divided by, is > 0 unless the micro-batch
                contributes nothing.
            **kwargs: for DeepSpeed's `backward`.
        """
        if weighting.silences(counts):
            if not isinstance(loss, torch.Tensor):
                loss = sum(loss.values(), torch.zeros((), device=self._engine.device))
            # A function of autograd may write to w.grad itself (fused weight gradients), which no hook of w sees: it
            # is given a gradient of 0, too.
            with silenced(self._engine.module):
                self._backward(silent(loss), **kwargs)
            return torch.zeros_like(loss)
        if not isinstance(loss, torch.Tensor):
            combined = self._combined(loss, counts, weighting, window)
            self._meter.add(combined, window.expected)
            return self._scaled(combined * (self._averaged_over / self._peers), **kwargs)
        expected = window.expected
        self._meter.add(loss, 1 if weighting.reduction == "sum" else weighting.of(counts))
        divisor = weighting.divisor(expected, counts, self._averaged_over, self._peers)
        if loss.dtype in _HALVES:
            if not self._warned:
                self._warn_of_rounding(loss.dtype, 1 / divisor)
            loss = loss.float()
        return self._scaled(loss / divisor, **kwargs)

    def _combined(
        self, losses: Mapping[str, torch.Tensor], counts: Counts, weighting: Weighting, window: Window
    ) -> Any:
        """Return the sum of coefficient * weight * loss / total over the terms of one micro-batch."""
        terms = weighting.terms
        assert terms is not None, "the names of terms have been checked"
        # Where all have one unit, each is divided by its part of the expected total, and all are corrected alike.
        divisors = window.divisors or (window.expected / len(terms),) * len(terms)
        parts = []
        summed = weighting.reduction == "sum"
        weights = counts.weights or (0.0,) * len(terms)
        for term, weight, divisor in zip(terms, weights, divisors, strict=True):
            loss = losses.get(term.name)
            if loss is None:
                continue
            # A sum over turns that finish no rollout is a part of their rollout's loss.
            part = summed and counts.tokens > 0 and term.unit in ("rollout", "target") and term.name not in counts.lacks
            own = loss.reshape(()) if loss.dtype == torch.float64 else loss.reshape(()).float()
            if not divisor or not (weight or part):
                parts.append(silent(own))
                continue
            coefficient = term.coefficient * (1 if summed else weight) / divisor
            if loss.dtype in _HALVES and not self._warned:
                self._warn_of_rounding(loss.dtype, coefficient * self._averaged_over / self._peers)
            parts.append(own * coefficient)
            self._meter.add_term(term.name, own, 1 if summed else weight, weight)
        return sum(parts[1:], parts[0])

    def _scaled(self, scaled: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        scale = self._adapter.unscaled_loss_scale()
        if scale == 1:
            return self._backward(scaled, **kwargs)
        self._backward(scaled.float() * scale, **kwargs)
        return scaled

    def _warn_of_rounding(self, dtype: torch.dtype, coefficient: float) -> None:
        # What flows back into a loss has the loss's own type, so no division can keep it exact.
        # A loss scale is a power of two that keeps it within the range, so that only digits are lost.
        digits, exponent = math.frexp(coefficient)
        rounded = math.ldexp(torch.tensor(digits, dtype=torch.float64, device="cpu").to(dtype).item(), exponent)
        if rounded == coefficient:
            return
        self._warned = True
        _LOG.warning(
            "backward() got a loss in %s, in which its coefficient %.9g is %.9g (off by %.1e): micro-batches enter the "
            "step with slightly wrong weights; compute the loss in fp32 (logits.float() before the softmax, or "
            "log-probabilities in fp32 before they are averaged). This is said once",
            *(str(dtype).removeprefix("torch."), coefficient, rounded, abs(rounded / coefficient - 1)),
        )

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._adapter.begin_backward()
        try:
            accumulated: torch.Tensor = self._engine.backward(loss, scale_wrt_gas=False, **kwargs)
        except IndexError as error:
            self._adapter.kept.explain_backward(error)
            raise
        except (AssertionError, AttributeError) as error:
            explain(error, self._engine.zero_optimization_stage())
            raise
        except RuntimeError as error:
            self._adapter.moved.explain(error)
            raise
        self._adapter.end_backward()
        self._adapter.kept.after_backward()
        return accumulated


def silent(loss: torch.Tensor) -> torch.Tensor:
    """Return 0 for a loss that weighs nothing, finite or not.

    A gradient of 0 flows back into the loss; `silenced` is for what a forward that is not finite makes of it.
    """
    result: torch.Tensor = _Silent.apply(loss)  # type: ignore[no-untyped-call]
    return result


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


@contextmanager
def silenced(module: torch.nn.Module) -> Iterator[None]:
    """Make whatever backward runs inside contribute exactly zero, also where the forward gave inf or NaN.

    The zeros are put in before a gradient is accumulated, so that DeepSpeed's reductions run as in any other pass.
    """
    trained = (p for p in module.parameters() if p.requires_grad)
    handles = [p.register_hook(_zeros) for p in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradient: torch.Tensor | None) -> torch.Tensor | None:
    # A function of autograd may give None for a parameter.
    return None if gradient is None else torch.zeros_like(gradient)
