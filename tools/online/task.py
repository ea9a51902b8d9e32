"""What is learned: adding two numbers. Characters are tokens; the reward is 1 for the right sum, 0 for all else.

Everything that makes this a run about additions is here. For a model and a task of your own, replace `build`,
`problem`, `reward` and `generate`, and drop `warmed_up`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name by which torch's own documentation calls it)
from torch import Tensor, nn

from ds_parity.parity.data.model import TinyDecoder

CHARACTERS = "_0123456789+=;"
"""A character's place is its token id; `_` fills up, `;` ends an answer."""
PAD, END = CHARACTERS.index("_"), CHARACTERS.index(";")
LONGEST = 4
"""Tokens of the longest answer: three digits and the end."""
LARGEST = 499
"""The greatest number in a problem whose sum is no longer."""


def build(seed: int) -> nn.Module:
    """Return the policy with random weights (51,000 parameters), the same for a seed."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = TinyDecoder(vocab=len(CHARACTERS), width=64, layers=1, heads=4, max_length=16)
    torch.set_rng_state(state)
    return model


def encoded(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [CHARACTERS.index(character) for character in text]


def decoded(tokens: Sequence[int]) -> str:
    """Return the text of token ids."""
    return "".join(CHARACTERS[token] for token in tokens)


def problem(numbers: random.Random, largest: int) -> str:
    """Return a prompt, such as `7+58=`."""
    return f"{numbers.randint(0, largest)}+{numbers.randint(0, largest)}="


def reward(prompt: str, answer: str) -> float:
    """Return 1 where the answer is the sum, and ends; else 0."""
    return float(answer == solved(prompt))


def solved(prompt: str) -> str:
    """Return the right answer to a prompt."""
    return f"{sum(map(int, prompt.rstrip('=').split('+')))};"


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Sequence[str], generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample one answer for each prompt, at temperature 1.

    Args:
        model: the policy, on the CPU.
        prompts: B of them.
        generator: of the random numbers.

    Returns:
        The token ids of each answer, up to its end or LONGEST of them, and their log probabilities in nats.
    """
    asked = [encoded(prompt) for prompt in prompts]
    lengths = torch.tensor([len(one) for one in asked])
    ids = torch.full((len(asked), int(lengths.max()) + LONGEST), PAD)
    for row, one in enumerate(asked):
        ids[row, : len(one)] = torch.tensor(one)
    rows, chosen, logps = torch.arange(len(asked)), [], []
    for _ in range(LONGEST):
        # What fills up on the right is never seen: attention is causal.
        logits = model(ids[:, : int(lengths.max())])[rows, lengths - 1].float()
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        chosen.append(token)
        logps.append(logits.log_softmax(-1).gather(-1, token))
        ids[rows, lengths] = token.squeeze(-1)
        lengths += 1
    tokens, scores = torch.cat(chosen, -1).tolist(), torch.cat(logps, -1).tolist()
    sizes = [answer.index(END) + 1 if END in answer else LONGEST for answer in tokens]
    return [one[:n] for one, n in zip(tokens, sizes, strict=True)], [
        one[:n] for one, n in zip(scores, sizes, strict=True)
    ]


def warmed_up(seed: int, largest: int, level: float, most: int = 4000) -> tuple[nn.Module, int, float]:
    """Train a fresh policy on right answers until a share of what it samples is right.

    A policy that is never right has no reward to learn from. This is ordinary supervised training, in one process.

    Args:
        seed: of the weights and the problems.
        largest: the greatest number in a problem.
        level: the mean reward to stop at, in [0, 1]; measured every 5 steps on 512 samples.
        most: steps after which it stops in any case.

    Returns:
        The policy, the steps that it took, and the mean reward reached.
    """
    model, numbers = build(seed), random.Random(f"warm-up/{seed}")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, most + 1):
        prompts = [problem(numbers, largest) for _ in range(128)]
        loss = _supervised(model, prompts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == most:
            reached = mean_reward(model, largest, generator, numbers, 512)
            if reached >= level:
                break
    return model, step, reached


def mean_reward(
    model: nn.Module, largest: int, generator: torch.Generator, numbers: random.Random, count: int
) -> float:
    """Return the mean reward of one sampled answer to each of `count` problems."""
    prompts = [problem(numbers, largest) for _ in range(count)]
    answers, _ = generate(model, prompts, generator)
    return sum(map(reward, prompts, map(decoded, answers))) / count


def _supervised(model: nn.Module, prompts: Sequence[str]) -> Tensor:
    rows = [encoded(prompt + solved(prompt)) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    labels = ids[:, 1:].clone()
    for row, prompt in enumerate(prompts):
        labels[row, : len(prompt) - 1] = PAD
    return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), labels, ignore_index=PAD)
