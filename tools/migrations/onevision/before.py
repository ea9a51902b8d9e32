"""The training loop of OneVision-Encoder around its pull request #82, in our words, over the bare DeepSpeed engine.

    deepspeed --num_accelerators 2 tools/migrations/onevision/before.py --state before --trace before.jsonl
    deepspeed --num_accelerators 2 tools/migrations/onevision/before.py --state half --trace half.jsonl
    deepspeed --num_accelerators 2 tools/migrations/onevision/before.py --state merged --trace merged.jsonl

- before: 29826ef5, training/train.py:353 and 655-669;
- half: the first commit of the pull request, where the schedule moves by steps, and its budget counts micro-batches;
- merged: b02db5bf.

OneVision-Encoder trains with DDP of torch; whether DeepSpeed reduces is said here by the boundary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.migrations.common import Found, Watch, arguments, launched, plain_of, say
from tools.migrations.onevision.task import PASSES, TOTAL, built, mean, stream

CONFIG = Path(__file__).with_name("ds_config.json")
STATES = ("before", "half", "merged")


def train(config: Found, state: str, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    model, optimizer, scheduler = built(TOTAL // PASSES if state == "merged" else TOTAL, probe)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    watch = Watch(engine, "rollouts", mean if probe else None, built(TOTAL, probe)[0], trace, config, passes=True)
    rates = [scheduler.get_last_lr()[0]]
    for number, batch in enumerate(stream()):
        loss = engine(**batch.inputs)
        last = (number if state == "before" else number + 1) % PASSES == 0
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss / PASSES)
        watch.ran(batch, loss)
        engine.step()
        watch.stepped()
        if last:
            watch.steps[-1]["rates"] = rates
            rates = []
        if last or state == "before":
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, state=("before", "of the loop: before, half or merged"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.state, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
