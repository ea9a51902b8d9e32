"""A decoder small enough to compare bit by bit, and the policy-gradient loss that is put on any decoder."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from torch import Tensor, nn

from ds_parity.errors import ConfigError
from ds_parity.parity.rollouts import VOCAB

_CHOICES = {
    "loss_weight": ("rollout", "token", "pass", "target"),
    "loss_reduction": ("mean", "sum"),
    "objective": ("policy_gradient", "nll"),
}


class TinyDecoder(nn.Module):
    """A decoder-only transformer: pre-norm RMSNorm, rotary positions, causal attention, no dropout, no biases.

    Every parameter is used in every forward and lies in the module that uses it (no tied head), as ZeRO 3 needs it.

    Args:
        vocab: token ids are in [0, vocab).
        width: channels of the residual stream, a multiple of 2 * heads.
        layers: blocks of attention and MLP.
        heads: attention heads of width / heads channels each.
        max_length: the longest sequence taken, in tokens.

    Raises:
        ConfigError: `width` is not a multiple of 2 * `heads`.
    """

    def __init__(
        self, vocab: int = VOCAB, width: int = 64, layers: int = 2, heads: int = 4, max_length: int = 2048
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(f"width = {width}: rotary heads need a multiple of 2 * heads = {2 * heads}")
        self.max_length = max_length
        self.channels = width // heads
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, first: int = 0) -> Tensor:
        """Return the logits of each next token.

        Args:
            input_ids: (B, T) int64, padded on the right; first + T in [1, max_length].
            first: position of the first token (>= 0), where these are a slice of longer sequences.

        Returns:
            (B, T, vocab) in the parameters' dtype; position t has seen tokens 0..t only.

        Raises:
            ConfigError: T is beyond `max_length`.
        """
        length = input_ids.shape[1]
        if first + length > self.max_length:
            raise ConfigError(
                f"sequence of {first + length} tokens: max_length is {self.max_length}; shorten the rollouts"
            )
        hidden = self.embedding(input_ids)
        rotation = _rotation(first, length, self.channels, input_ids.device)
        for block in self.blocks:
            hidden = block(hidden, rotation)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]  # modules are untyped callables


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to what came before; all (B, heads, T, channels)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class _Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream; `mix` may be replaced by a sharded attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))  # type: ignore[no-any-return]  # as above

    def _attend(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self.mix(_rotate(query, rotation), _rotate(key, rotation), value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]  # as above


def _rotation(first: int, length: int, channels: int, device: torch.device) -> Tensor:
    """Return (2, length, channels / 2) fp64: cosine and sine of rotary positions (Su et al. 2021, arXiv 2104.09864).

    Made anew in each forward: as a buffer it would be rounded when an engine casts the module to half precision.
    """
    frequency = 10_000.0 ** -torch.arange(0, 1, 2 / channels, dtype=torch.float64, device=device)
    angle = torch.outer(torch.arange(first, first + length, dtype=torch.float64, device=device), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate (B, H, T, C) by position, each channel of the first half paired with one of the second."""
    cosine, sine = rotation.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def build(seed: int = 0) -> nn.Module:
    """Return the standard decoder (width 64, two layers, 132,000 parameters), on the CPU, the same for a seed."""
    return _build(seed, width=64, layers=2, heads=4)


def build_tiny(seed: int = 0) -> nn.Module:
    """Return the decoder for tests (width 32, one layer, 29,000 parameters), on the CPU, the same for a seed."""
    return _build(seed, width=32, layers=1, heads=4)


def _build(seed: int, width: int, layers: int, heads: int) -> nn.Module:
    """Draw every weight from one generator.

    Matrices have std 1 / sqrt(fan in), so that no gradient is tiny. Embeddings have std 1: the norms behind a smaller
    stream magnify what bf16 rounds off (measured on one long rollout: a gradient 17 % off, with std 1 it is 4 %).
    """
    with torch.device("meta"):  # draws nothing from torch's global generator
        model = TinyDecoder(width=width, layers=layers, heads=heads)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                std = 1.0 if name == "embedding.weight" else 1 / math.sqrt(parameter.shape[1])
                parameter.normal_(std=std, generator=generator)
    return model


class PolicyGradient(nn.Module):
    """The loss of one micro-batch: token-level policy gradient, GRPO at ratio 1 (Shao et al. 2024, arXiv 2402.03300).

    Per loss token -advantage * logp. Its gradient is that of -advantage * ratio at ratio 1, whose value would be
    -advantage whatever the weights are: a trace of it could not show that two runs part. The units that these are
    summed over:

    - loss_weight "token": the loss tokens, all alike;
    - any other ("rollout", "pass", "target"): the rollouts, each with the mean over its own loss tokens.

    loss_reduction "mean" divides by the micro-batch's number of units, "sum" does not. To "pass" the micro-batch is one
    unit, so there the two are the same.

    Args:
        policy: called as policy(input_ids), returns logits (B, T, V) or an object that has them as `.logits`.
        loss_weight: rollout | token | pass | target.
        loss_reduction: mean | sum.
        objective: policy_gradient, or nll: the negative log likelihood, for which advantages are passed over.

    Raises:
        ConfigError: one of the three choices is unknown.
    """

    def __init__(
        self,
        policy: nn.Module,
        loss_weight: str = "rollout",
        loss_reduction: str = "mean",
        objective: str = "policy_gradient",
    ) -> None:
        super().__init__()
        given = {"loss_weight": loss_weight, "loss_reduction": loss_reduction, "objective": objective}
        for name, value in given.items():
            if value not in _CHOICES[name]:
                raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(_CHOICES[name])}")
        self.policy = policy
        self.loss_weight = loss_weight
        self.loss_reduction = loss_reduction
        self.objective = objective

    def forward(self, input_ids: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
        """Return the micro-batch's loss, a scalar in fp32 (in fp64 where the logits are).

        Token counts are clamped at 1: a micro-batch without loss tokens gives 0 * the logits, a loss of 0 whose
        gradient is 0 and reaches every parameter. A rollout without loss tokens has mean 0 and still counts as one.

        Args:
            input_ids: (B, T) int64, padded on the right, B >= 1.
            loss_mask: (B, T - 1) float, 1 where input_ids[:, 1:] carries the loss, 0 elsewhere.
            advantages: (B,) float.
        """
        output: Any = self.policy(input_ids)
        logits: Tensor = getattr(output, "logits", output)
        losses = self.token_losses(logits[:, :-1], input_ids[:, 1:], advantages)
        mask = loss_mask.to(losses.dtype)
        return self.reduce(losses * mask, mask)

    def token_losses(self, logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of every token (B, T) from logits (B, T, V), targets (B, T) and advantages (B,)."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logp = wide.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if self.objective == "nll":
            return -logp
        return -advantages.to(logp.dtype).unsqueeze(-1) * logp

    def reduce(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the micro-batch's loss from masked losses (B, any), which may be partial sums, and mask (B, T - 1)."""
        if self.loss_weight == "token":
            total = losses.sum()
            return total / mask.sum().clamp(min=1) if self.loss_reduction == "mean" else total
        means = losses.sum(-1) / mask.sum(-1).clamp(min=1)
        return means.sum() if self.loss_reduction == "sum" and self.loss_weight != "pass" else means.mean()
