"""The same stream with ds_parity: the counts end windows, and their total divides the loss.

    deepspeed --num_accelerators 2 tools/migrations/fast_llm/after.py --trace after.jsonl
    deepspeed --num_accelerators 2 tools/migrations/fast_llm/after.py --same --trace same.jsonl

With --same a window counts from 0, as a step of Fast-LLM does, and an unfinished one is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, Watch, arguments, launched, say
from tools.migrations.fast_llm.task import UNITS, built, mean, stream, units

CONFIG = Path(__file__).with_name("ds_config.json")
SAME = {"overshoot": "reset", "last_window": "drop"}


def train(config: Found, loss: str, trace: Path | None = None, probe: bool = False, same: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    config = config | {"ds_parity": config["ds_parity"] | losses(loss) | (SAME if same else {})}
    model, twin = built(loss), built(loss, "mean")
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=config)
    of = "rollouts" if UNITS[loss] == "rollout" else "tokens"
    watch = Watch(engine, of, mean if probe else None, twin, trace, config)
    for batch in engine.passes(stream()):
        summed = engine(**batch.inputs)
        engine.backward(summed)
        watch.ran(batch, summed / max(units(batch, loss), 1))
        engine.step()
        watch.stepped()
    return watch


def losses(loss: str) -> Found:
    """Return the keys that say what the loss is a sum over."""
    return {"loss_weight": UNITS[loss], "loss_reduction": "sum"}


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    loss = ("documents", "what it is divided by: documents or labels")
    given = arguments(__doc__, argv, CONFIG, loss=loss, same=(False, "count from 0"))
    deepspeed.init_distributed()
    say("after", train(given.config, given.loss, given.trace, given.probe, given.same).close())


if __name__ == "__main__":
    sys.exit(launched(main))
