"""A decoder small enough to compare bit by bit; it takes sequences in rows, or packed into one."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from torch import Tensor, nn

from ds_parity.errors import ConfigError
from ds_parity.parity.data.rollouts import VOCAB


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

    def forward(self, input_ids: Tensor, first: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits of each next token.

        Args:
            input_ids: (B, T) int64, padded on the right; first + T in [1, max_length].
            first: position of the first token (>= 0), where these are a slice of longer sequences.
            position_ids: (1, T) int64 where B = 1 and sequences are packed end to end: 0 where one starts. Attention is
                block-diagonal: no sequence sees another.

        Returns:
            (B, T, vocab) in the parameters' dtype; position t has seen tokens 0..t of its own sequence only.

        Raises:
            ConfigError: a sequence is beyond `max_length`.
        """
        length = input_ids.shape[1]
        if position_ids is None:
            positions, lengths = torch.arange(first, first + length, device=input_ids.device), None
        else:
            positions, lengths = position_ids[0], segment_lengths(position_ids)
        longest = max(lengths) if lengths else first + length
        if longest > self.max_length:
            raise ConfigError(f"sequence of {longest} tokens: max_length is {self.max_length}; shorten the rollouts")
        hidden = self.embedding(input_ids)
        rotation = _rotation(positions, self.channels)
        for block in self.blocks:
            hidden = block(hidden, rotation, lengths)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]  # modules are untyped callables


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to what came before; all (B, heads, T, channels)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def block_diagonal(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor], heads: Sequence[Tensor], lengths: Sequence[int]
) -> Tensor:
    """Attend inside each of the sequences that are packed along T, and to no other.

    Args:
        mix: attention over one sequence.
        heads: query, key and value, (1, heads, T, channels) each.
        lengths: of the sequences in tokens; they sum to T.
    """
    parts = zip(*(torch.split(one, list(lengths), dim=2) for one in heads), strict=True)
    return torch.cat([mix(*part) for part in parts], dim=2)


def segment_lengths(position_ids: Tensor) -> list[int]:
    """Return how long each packed sequence is; (1, T) positions, 0 where one starts."""
    starts = (position_ids[0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], position_ids.shape[1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


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

    def forward(self, hidden: Tensor, rotation: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden), rotation, lengths)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))  # type: ignore[no-any-return]  # as above

    def _attend(self, hidden: Tensor, rotation: Tensor, lengths: Sequence[int] | None) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = (_rotate(query, rotation), _rotate(key, rotation), value)
        mixed = self.mix(*heads) if lengths is None else block_diagonal(self.mix, heads, lengths)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]  # as above


def _rotation(positions: Tensor, channels: int) -> Tensor:
    """Return (2, T, channels / 2) fp64: cosine and sine of rotary positions (Su et al. 2021, arXiv 2104.09864).

    Made anew in each forward: as a buffer it would be rounded when an engine casts the module to half precision.
    """
    frequency = 10_000.0 ** -torch.arange(0, 1, 2 / channels, dtype=torch.float64, device=positions.device)
    angle = torch.outer(positions.double(), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate (B, H, T, C) by position, each channel of the first half paired with one of the second."""
    cosine, sine = rotation.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def build(seed: int = 0, vocab: int = VOCAB) -> nn.Module:
    """Return the standard decoder (width 64, two layers, 132,000 parameters), on the CPU, the same for a seed."""
    return _build(seed, vocab=vocab, width=64, layers=2, heads=4)


def build_tiny(seed: int = 0, vocab: int = VOCAB) -> nn.Module:
    """Return the decoder for tests (width 32, one layer, 29,000 parameters), on the CPU, the same for a seed."""
    return _build(seed, vocab=vocab, width=32, layers=1, heads=4)


def _build(seed: int, vocab: int, width: int, layers: int, heads: int) -> nn.Module:
    """Draw every weight from one generator.

    Matrices have std 1 / sqrt(fan in), so that no gradient is tiny. Embeddings have std 1: the norms behind a smaller
    stream magnify what bf16 rounds off (measured on one long rollout: a gradient 17 % off, with std 1 it is 4 %).
    """
    with torch.device("meta"):  # draws nothing from torch's global generator
        model = TinyDecoder(vocab=vocab, width=width, layers=layers, heads=heads)
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
