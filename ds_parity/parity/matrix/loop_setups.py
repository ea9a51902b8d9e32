"""Models and training functions of the rows on loops: what runs beside a pass, and what one backward reaches.

A training function must be right on any split of its rollouts, because the torch reference runs it on whole windows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_parity.parity.data.model import TinyDecoder, build_tiny
from ds_parity.parity.data.rollouts import VOCAB
from ds_parity.planning.rollout import MicroBatch

_GENERATED = 3  # tokens
_LATE = 2  # windows before a parameter is used


class TrainedEngine(Protocol):
    """What a training function uses of an engine; the torch reference has it, too."""

    @property
    def module(self) -> Any:
        """The model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""

    def backward(self, loss: Any, **kwargs: Any) -> Any:
        """Run the backward of a pass."""

    def step(self) -> None:
        """End the pass."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Say whether the pass ends a window."""

    def eval(self) -> Any:
        """Switch to evaluation."""

    def train(self) -> Any:
        """Switch back."""


Passes = Iterable[MicroBatch]


# Models.


class _Twice(nn.Module):
    """A block that runs twice in one forward, so that one backward reaches its weights twice."""

    def __init__(self, block: nn.Module, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, hidden: Tensor, *others: Any) -> Tensor:
        for _ in range(2):
            if self.reentrant is None:
                hidden = self.block(hidden, *others)
            else:
                hidden = checkpoint(self.block, hidden, *others, use_reentrant=self.reentrant)
        return hidden


class _InFp64(nn.Module):
    """A policy whose logits are given in fp64, so that its loss is in fp64, too."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.policy(input_ids).double()  # type: ignore[no-any-return]  # modules are untyped callables


class _WithLate(nn.Module):
    """A policy with a layer on its logits that is used where a forward is told to."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.late = policy, nn.Linear(VOCAB, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, late: bool = False) -> Tensor:
        logits: Tensor = self.policy(input_ids)
        return logits + self.late(logits) if late else logits


def twice(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with its block run twice."""
    return _looped(seed, reentrant=None)


def twice_checkpointed(seed: int = 0) -> nn.Module:
    """Return it with activation checkpointing around each of the two."""
    return _looped(seed, reentrant=False)


def twice_reentrant(seed: int = 0) -> nn.Module:
    """Return it with reentrant activation checkpointing, whose backward runs a backward for each of the two."""
    return _looped(seed, reentrant=True)


def tied(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with one weight for its embedding and its head."""
    model = _tiny(seed)
    model.embedding.weight = model.head.weight
    return model


def in_fp64(seed: int = 0) -> nn.Module:
    """Return the tiny decoder with logits in fp64."""
    return _InFp64(build_tiny(seed))


def with_late(seed: int = 0) -> nn.Module:
    """Return the tiny decoder and a layer that is used later."""
    torch.manual_seed(seed)
    return _WithLate(build_tiny(seed))


def of_transformers(seed: int = 0) -> nn.Module:
    """Return a GPT-2 of transformers with one layer, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    off: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=128, **off)
    return GPT2LMHeadModel(config)


def _tiny(seed: int) -> TinyDecoder:
    model = build_tiny(seed)
    assert isinstance(model, TinyDecoder)
    return model


def _looped(seed: int, reentrant: bool | None) -> nn.Module:
    model = _tiny(seed)
    model.blocks = nn.ModuleList(_Twice(block, reentrant=reentrant) for block in model.blocks)
    return model


# Training functions.


def _log_likelihood(logits: Any, batch: MicroBatch) -> Tensor:
    """Return (B, T - 1) log-probabilities of the loss tokens, 0 elsewhere."""
    ids, mask = batch.inputs["input_ids"], batch.inputs["loss_mask"]
    logits = getattr(logits, "logits", logits)[:, :-1]
    logp = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1) * mask  # type: ignore[no-any-return]  # inputs are Any


def _mean(logp: Tensor, batch: MicroBatch) -> Tensor:
    """Return minus their mean over loss tokens."""
    return -logp.sum() / batch.inputs["loss_mask"].sum().clamp(min=1)  # type: ignore[no-any-return]


def several_forwards(engine: TrainedEngine, micro_batches: Passes) -> None:
    """One backward through two forwards, of which each gives the losses of every other token."""
    for batch in micro_batches:
        first, second = (_log_likelihood(engine(batch.inputs["input_ids"]), batch) for _ in range(2))
        every_other = torch.arange(first.shape[1], device=first.device) % 2 == 0
        engine.backward(_mean(torch.where(every_other, first, second), batch))
        engine.step()


def retained(engine: TrainedEngine, micro_batches: Passes) -> None:
    """Each backward keeps its graph."""
    for batch in micro_batches:
        loss = _mean(_log_likelihood(engine(batch.inputs["input_ids"]), batch), batch)
        engine.backward(loss, retain_graph=True)
        engine.step()


def evaluated(engine: TrainedEngine, micro_batches: Passes) -> None:
    """Forwards in eval() before a forward, before its backward, before its step and after it."""

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            engine(batch.inputs["input_ids"])
        engine.train()

    for batch in micro_batches:
        evaluate()
        loss = _mean(_log_likelihood(engine(batch.inputs["input_ids"]), batch), batch)
        evaluate()
        engine.backward(loss)
        evaluate()
        engine.step()
        evaluate()


def gathered(engine: TrainedEngine, micro_batches: Passes) -> None:
    """All weights are gathered and read between passes, and by the first rank written anew where a window ends."""
    for batch in micro_batches:
        engine.backward(_mean(_log_likelihood(engine(batch.inputs["input_ids"]), batch), batch))
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        weights = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(weights, modifier_rank=0 if ends else None):
            for weight in weights:
                assert weight.numel()
                assert bool(weight.isfinite().all())
                weight.data.copy_(weight.data.clone())


def generated(engine: TrainedEngine, micro_batches: Passes) -> None:
    """The model samples before each pass, and between each backward and its step."""

    def sample() -> None:
        engine.module.eval()
        # Of one length on all ranks: each of its forwards gathers weights on ZeRO 3.
        ids = batch.inputs["input_ids"][:1, :4]
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        answer = engine.module.generate(**prompt, do_sample=True, min_new_tokens=_GENERATED, max_new_tokens=_GENERATED)
        assert answer.shape[1] == ids.shape[1] + _GENERATED
        engine.module.train()

    for batch in micro_batches:
        sample()
        loss = _mean(_log_likelihood(engine(batch.inputs["input_ids"]), batch), batch)
        engine.backward(loss)
        sample()
        engine.step()


def late(engine: TrainedEngine, micro_batches: Passes) -> None:
    """A layer gets its first gradient in the third window."""
    windows = 0
    for batch in micro_batches:
        logits = engine(batch.inputs["input_ids"], late=windows >= _LATE)
        engine.backward(_mean(_log_likelihood(logits, batch), batch))
        windows += engine.is_gradient_accumulation_boundary()
        engine.step()
