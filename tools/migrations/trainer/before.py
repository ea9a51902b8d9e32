"""transformers' own Trainer (release 5.23), as it is, on DeepSpeed.

    deepspeed --num_accelerators 2 tools/migrations/trainer/before.py --kind own --probe
    deepspeed --num_accelerators 2 tools/migrations/trainer/before.py --kind means --probe

Its division is in transformers/trainer.py, lines 2101 to 2111, 2199 to 2206 and 2298 to 2359 of release 5.23.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.migrations.common import Found, arguments, launched, plain_of, say
from tools.migrations.trainer.task import ended, trainer_of, watched

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, kind: str, probe: bool = False, trace: Path | None = None) -> list[Found]:
    """Train, and return the steps."""
    return ended(watched(trainer_of(plain_of(config), kind, probe), probe, trace, config))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, kind=("own", "how it divides: own, means or right"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.kind, given.probe, given.trace))


if __name__ == "__main__":
    sys.exit(launched(main))
