"""The same training with ds_parity: three lines of the loop are others, and the configuration says the rest.

deepspeed --num_accelerators 2 tools/migrations/openrlhf/after.py --dynamic --probe
deepspeed --num_accelerators 2 tools/migrations/openrlhf/after.py --trace after.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, Watch, arguments, launched, policy, say
from tools.migrations.openrlhf.task import (
    Critic,
    actor_loss,
    batch_of,
    critic_loss,
    dealt,
    mean,
    tokens_of,
)
from tools.migrations.openrlhf.watching import watched

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, dynamic: bool, trace: Path | None = None, probe: bool = False) -> dict[str, Watch]:
    """Train both; returns what was seen of each engine."""
    ranks = dist.get_world_size()
    actor, critic = policy(), Critic()
    engines = {
        "actor": ds_parity.initialize(model=actor, model_parameters=actor.parameters(), config=config)[0],
        "critic": ds_parity.initialize(model=critic, model_parameters=critic.parameters(), config=config)[0],
    }
    losses = {"actor": actor_loss, "critic": critic_loss}
    watches = watched(engines, losses, config, trace, probe)
    for window in dealt(dynamic):
        tokens = tokens_of(window)
        for row in window:
            batch, last = batch_of(row), row is window[-1]
            for name, engine in engines.items():
                loss = losses[name](engine, batch)
                engine.backward(loss / tokens * ranks, rollouts=batch.rollouts, tokens=batch.tokens)
                watches[name].ran(batch, mean(loss, batch))
                if last:
                    engine.step()
                    watches[name].stepped()
    return watches


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the arguments and train; returns the steps of both engines."""
    given = arguments(__doc__, argv, CONFIG, dynamic=(False, "micro-batches by tokens, as many as are needed"))
    deepspeed.init_distributed()
    watches = train(given.config, given.dynamic, given.trace, given.probe)
    for name, watch in watches.items():
        say(f"after, {name}", watch.close())
    return {name: watch.steps for name, watch in watches.items()}


if __name__ == "__main__":
    sys.exit(launched(main))
