"""OpenRLHF's training of actor and critic (read in 3c3be623), in our words, over the bare engine.

    deepspeed --num_accelerators 2 tools/migrations/openrlhf/before.py --dynamic --probe
    deepspeed --num_accelerators 2 tools/migrations/openrlhf/before.py --trace before.jsonl

Cited: openrlhf/trainer/ray/ppo_actor.py:354-359, ppo_critic.py:169-174, openrlhf/utils/deepspeed/deepspeed.py:451-456,
openrlhf/utils/loss_utils.py:54-105.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.migrations.common import Found, Watch, arguments, launched, plain_of, policy, say
from tools.migrations.openrlhf.task import (
    BATCH,
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
    gas = 1 if dynamic else BATCH["fixed"] // ranks
    config = plain_of(config) | {"gradient_accumulation_steps": gas}
    actor, critic = policy(), Critic()
    engines = {
        "actor": deepspeed.initialize(model=actor, model_parameters=actor.parameters(), config=config)[0],
        "critic": deepspeed.initialize(model=critic, model_parameters=critic.parameters(), config=config)[0],
    }
    losses = {"actor": actor_loss, "critic": critic_loss}
    watches = watched(engines, losses, config, trace, probe)
    for window in dealt(dynamic):
        tokens = tokens_of(window)
        for row in window:
            batch, last = batch_of(row), row is window[-1]
            for name, engine in engines.items():
                loss = losses[name](engine, batch)
                engine.backward(loss / (tokens / gas) * ranks)
                watches[name].ran(batch, mean(loss, batch))
                if last or not dynamic:
                    engine.step()
                    watches[name].stepped()
    return watches


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the arguments and train; returns the steps of both engines."""
    given = arguments(__doc__, argv, CONFIG, dynamic=(False, "micro-batches by tokens, as many as are needed"))
    deepspeed.init_distributed()
    watches = train(given.config, given.dynamic, given.trace, given.probe)
    for name, watch in watches.items():
        say(f"before, {name}", watch.close())
    return {name: watch.steps for name, watch in watches.items()}


if __name__ == "__main__":
    sys.exit(launched(main))
