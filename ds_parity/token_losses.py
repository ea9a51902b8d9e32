"""What losses are made of: log probabilities of tokens, masks, rows of packed sequences, and how a loss is reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_parity.errors import ConfigError


def masked(values: Tensor, loss_mask: Tensor, segment_ids: Tensor | None, sequences: int) -> tuple[Tensor, Tensor]:
    """Return the values times the mask, and the mask: a row for each sequence, packed or not.

    Args:
        values: (sequences, T - 1) float; packed (1, T - 1).
        loss_mask: of the same shape, 1 for each loss token and 0 elsewhere.
        segment_ids: packed (1, T) int64, the number of each token's sequence; None where they are padded.
        sequences: how many there are.

    Raises:
        ConfigError: the mask has another shape than the values.
    """
    if loss_mask.shape != values.shape:
        raise ConfigError(
            f"loss_mask has the shape {tuple(loss_mask.shape)}, must be {tuple(values.shape)}: one number for each "
            "token of input_ids[:, 1:]; ds_parity.collate makes it so"
        )
    mask = loss_mask.to(values.dtype)
    # Padding may be a token whose logit is -inf, and 0 times that is NaN.
    values = torch.where(mask == 0, torch.zeros_like(values), values * mask)
    if segment_ids is None:
        return values, mask
    return by_segment(values, segment_ids, sequences), by_segment(mask, segment_ids, sequences)


def reduced(losses: Tensor, mask: Tensor, loss_weight: str, loss_reduction: str, length: float | None = None) -> Tensor:
    """Return the scalar loss of a micro-batch from its token losses, as `PolicyGradient` describes it.

    Args:
        losses: (B, any) float, masked already; they may be partial sums over a rollout's tokens.
        mask: (B, T - 1) float, 1 for each loss token of a rollout and 0 elsewhere.
        loss_weight: rollout | token | pass | target.
        loss_reduction: mean | sum.
        length: what the sum over a rollout is divided by, None: its own loss tokens; not read for "token".
    """
    if loss_weight == "token":
        total = losses.sum()
        return total / mask.sum().clamp(min=1) if loss_reduction == "mean" else total
    means = losses.sum(-1) / (mask.sum(-1).clamp(min=1) if length is None else length)
    return means.sum() if loss_reduction == "sum" and loss_weight != "pass" else means.mean()


def logits_of(policy: nn.Module, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the logits (R, T, V) of a policy, which is given positions only where sequences are packed."""
    packed: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    if packed and _caches(policy):
        # With a cache, Hugging Face's models do not look for packed sequences, and rollouts attend to each other.
        packed["use_cache"] = False
    output: Any = policy(input_ids, **packed)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def _caches(policy: nn.Module) -> bool:
    """Whether a policy knows the argument use_cache; models of text and images keep it in their text configuration."""
    config: Any = getattr(policy, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return hasattr(text, "use_cache") or hasattr(config, "use_cache")


def token_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (R, T), the log probability of each target in nats, in fp32 (in fp64 where the logits are fp64)."""
    # In bf16 a log probability has 8 bits, too few for a sum over a thousand tokens.
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return precise.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def by_segment(values: Tensor, segment_ids: Tensor, segments: int) -> Tensor:
    """Return (segments, T - 1): a row for each packed sequence, 0 outside it.

    A sum over a row adds in one order on every device; a scattered sum (index_add_) would not.

    Args:
        values: (1, T - 1), of the tokens from the second on.
        segment_ids: (1, T) int64, the number of each token's sequence.
        segments: how many sequences there are.
    """
    own = segment_ids[:, 1:] == torch.arange(segments, device=segment_ids.device)[:, None]
    return values.where(own, torch.zeros_like(values))


def difference(one: Tensor, other: Tensor, loss_mask: Tensor) -> Tensor:
    """Return one - other where the mask is 1, and 0 elsewhere: what stands there may be anything, also infinite."""
    return torch.where(loss_mask > 0, one - other.to(one.dtype), torch.zeros_like(one))
