"""TRL's own GRPOTrainer (1.16), as it is, on DeepSpeed.

    deepspeed --num_accelerators 2 tools/migrations/trl_grpo/before.py --loss bnpo --probe
    deepspeed --num_accelerators 2 tools/migrations/trl_grpo/before.py --loss dapo --probe

Its losses are in trl/trainer/grpo_trainer.py, `_compute_loss`, lines 3153 to 3173 of release 1.16.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

from trl import GRPOTrainer

from tools.migrations.common import Found, arguments, launched, plain_of, say
from tools.migrations.trl_grpo.task import ended, trainer_of, watched

CONFIG = Path(__file__).with_name("ds_config.json")
STEPS, GAS, PER_GENERATION = 4, 2, 4


def train(config: Found, loss: str, probe: bool = False, trace: Path | None = None) -> list[Found]:
    """Train, and return the steps."""
    kind = watched(GRPOTrainer, probe, trace, config)
    return ended(trainer_of(kind, plain_of(config), loss, STEPS, GAS, PER_GENERATION, probe))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, loss=("bnpo", "TRL's loss_type"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.loss, given.probe, given.trace))


if __name__ == "__main__":
    sys.exit(launched(main))
