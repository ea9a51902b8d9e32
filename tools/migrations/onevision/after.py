"""The same with ds_parity: the engine counts, and the scheduler moves with its steps.

deepspeed --num_accelerators 2 tools/migrations/onevision/after.py --trace after.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, Watch, arguments, launched, say
from tools.migrations.onevision.task import PASSES, TOTAL, built, mean, stream

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    model, optimizer, scheduler = built(TOTAL // PASSES, probe)
    engine, *_ = ds_parity.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    watch = Watch(engine, "rollouts", mean if probe else None, built(TOTAL, probe)[0], trace, config, passes=True)
    for batch in stream():
        loss = engine(**batch.inputs)
        engine.backward(loss)
        watch.ran(batch, loss)
        engine.step()
        watch.stepped()
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG)
    deepspeed.init_distributed()
    say("after", train(given.config, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
