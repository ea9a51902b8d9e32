"""What both loops train, and how they are asked to: real GSM8K rollouts, a small decoder, AdamW under a cosine."""

import argparse
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from ds_parity.config import Settings, load_config, parse
from ds_parity.errors import ConfigError
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import build
from ds_parity.parity.data.rollouts import load_rollouts
from ds_parity.parity.running.weights import vector
from ds_parity.planning import Rollout

HERE = Path(__file__).parent
WARM_UP = 2


@dataclass(frozen=True)
class Task:
    """A run of `steps` windows.

    Attributes:
        config: the extended DeepSpeed JSON.
        steps: optimizer steps to take (>= 1).
        max_tokens: in a micro-batch.
        eps: of AdamW.
        trace: where to write it.
    """

    config: dict[str, Any]
    steps: int
    max_tokens: int
    eps: float
    trace: Path

    @property
    def settings(self) -> Settings:
        """The extra keys."""
        settings = parse(self.config)
        if settings is None:
            raise ConfigError("gradient_accumulation_passes is absent: it says how many rollouts a step is made of")
        return settings

    @property
    def target(self) -> int:
        """Rollouts of a window, over all ranks."""
        return self.settings.target

    def windows(self) -> Iterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each window, in the order of arrival."""
        rollouts = _rollouts()
        most = len(rollouts) // self.target
        if not 1 <= self.steps <= most:
            raise ConfigError(f"steps = {self.steps}: {len(rollouts)} rollouts are 1 to {most} steps of {self.target}")
        for step in range(self.steps):
            yield rollouts[step * self.target : (step + 1) * self.target]

    def build(self) -> tuple[PolicyGradient, Optimizer, LambdaLR]:
        """Return the model with its loss (the sum of -advantage * logp over tokens), its optimizer and scheduler."""
        model = PolicyGradient(build(0), loss_weight="token", loss_reduction="sum")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=self.eps, weight_decay=0.01)
        return model, optimizer, LambdaLR(optimizer, self._lr_factor)

    def _lr_factor(self, step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / max(1, self.steps - WARM_UP))


@cache
def _rollouts() -> tuple[Rollout, ...]:
    return load_rollouts()


def arguments(description: str | None, argv: Sequence[str] | None, **flags: str) -> tuple[Task, argparse.Namespace]:
    """Read the command line; `flags` are those of one loop alone, with their help."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trace", type=Path, required=True, help="file to write, JSON Lines")
    parser.add_argument("--config", default=str(HERE / "ds_config.json"), help="extended DeepSpeed JSON")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--eps", type=float, default=1e-8, help="of AdamW")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher's
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=meaning)
    given = parser.parse_args(argv)
    return Task(load_config(given.config), given.steps, given.max_tokens, given.eps, given.trace), given


def rewards(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return (B,) the rewards of a micro-batch's rollouts."""
    return torch.tensor([rollout.reward for rollout in rollouts])


def say(name: str, engine: Any, passes: int, idle_passes: int) -> None:
    """Print, once, what a run came to; collective under ZeRO 3."""
    digest = hashlib.sha256(vector(engine.module).numpy().tobytes()).hexdigest()
    if dist.get_rank() == 0:
        print(f"{name}: {passes} passes, {idle_passes} idle on a rank, weights {digest[:12]}")
