"""SkyRL's mini-batches of step-wise trajectories, in our words, over the bare DeepSpeed engine.

    deepspeed --num_accelerators 2 tools/migrations/skyrl/before.py --rule sequences --batches 2 --trace sequences.jsonl
    deepspeed --num_accelerators 2 tools/migrations/skyrl/before.py --rule sequences --batches 3
    deepspeed --num_accelerators 2 tools/migrations/skyrl/before.py --rule prompts --batches 3 --trace prompts.jsonl

The second one is refused. Cited: `mini_batches.py`. SkyRL's own DeepSpeed strategy was removed in January 2026.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.migrations.common import Found, Watch, arguments, launched, plain_of, say
from tools.migrations.skyrl.mini_batches import by_prompts, by_sequences, shares
from tools.migrations.skyrl.task import MINI, SAMPLES, TURNS, built, few, mean, micro_batches, sequences, twin

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, rule: str, batches: int, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train on so many batches, 0: on one of few sequences; returns what was seen of the engine."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer, scheduler = built(max(batches, 1), probe)
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    watch = Watch(engine, mean=mean if probe else None, twin=twin(), trace=trace, config=config)
    for data in [sequences(*one) for one in enumerate(TURNS[:batches])] or [few()]:
        prompts = MINI if batches else 1
        mini_batches = by_prompts(data, prompts) if rule == "prompts" else by_sequences(data, prompts * SAMPLES)
        for mini_batch in mini_batches:
            tokens = sum(one.loss_tokens for one in mini_batch)
            own = list(micro_batches(shares(mini_batch, ranks)[rank], mini_batch))
            for batch in own:
                summed = engine(**batch.inputs)
                engine.set_gradient_accumulation_boundary(batch is own[-1])
                engine.backward(summed / tokens * ranks)
                watch.ran(batch, summed / max(batch.tokens, 1))
            engine.step()
            watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    rule = ("sequences", "what mini-batches count: sequences or prompts")
    given = arguments(__doc__, argv, CONFIG, rule=rule, batches=(3, "1 to 3, 0: few"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.rule, given.batches, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
