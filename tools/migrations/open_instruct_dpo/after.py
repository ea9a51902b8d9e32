"""The same micro-batches with ds_parity: a pair is the unit that weighs, and the one that metrics are averaged over.

deepspeed --num_accelerators 2 tools/migrations/open_instruct_dpo/after.py --trace after.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, Watch, arguments, launched, say
from tools.migrations.open_instruct_dpo.task import batches, built, mean

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    model = built()
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
    watch = Watch(engine, "rollouts", mean if probe else None, built(), trace, config)
    for micro_batch in engine.passes(one for batch in batches() for one in batch):
        loss, margins, _ = engine(**micro_batch.inputs)
        engine.record("accuracy", (margins > 0).float().mean(), weight=micro_batch.rollouts)
        engine.backward(loss)
        watch.ran(micro_batch, loss)
        engine.step()
        noted(engine, watch)
    noted(engine, watch)  # the last window, which the end of the data has closed
    return watch


def noted(engine: Any, watch: Watch) -> None:
    """Tell the watch of a step, and of its accuracy."""
    watch.stepped()
    if watch.steps:
        watch.steps[-1].setdefault("accuracy", engine.last_step.metrics["accuracy"])


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG)
    deepspeed.init_distributed()
    say("after", train(given.config, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
