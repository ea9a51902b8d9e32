"""The same Trainer, whose loss an engine of ds_parity divides by the labels of each step.

deepspeed --num_accelerators 2 tools/migrations/trainer/after.py --kind own --probe
deepspeed --num_accelerators 2 tools/migrations/trainer/after.py --kind means --probe
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

import ds_parity
from tools.migrations.common import Found, arguments, launched, say
from tools.migrations.trainer.task import ended, trainer_of, watched

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, kind: str, probe: bool = False, trace: Path | None = None) -> list[Found]:
    """Train, and return the steps."""
    with ds_parity.install(normalise="token"):
        return ended(watched(trainer_of(config, kind, probe), probe, trace, config))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, kind=("own", "how it divides: own, means or right"))
    deepspeed.init_distributed()
    say("after", train(given.config, given.kind, given.probe, given.trace))


if __name__ == "__main__":
    sys.exit(launched(main))
