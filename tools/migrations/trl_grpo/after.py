"""The same trainer, its loss divided by the tokens of each step, on an engine of ds_parity.

    deepspeed --num_accelerators 2 tools/migrations/trl_grpo/after.py --loss bnpo --probe
    deepspeed --num_accelerators 2 tools/migrations/trl_grpo/after.py --loss dapo --probe
    deepspeed --num_accelerators 2 tools/migrations/trl_grpo/after.py --loss by-step --probe

`ds_parity.install()` holds the trainer's windows to the rollouts that were consumed, and `normalise="token"` has the
engine divide the loss. With `--loss by-step` the trainer divides itself, by the tokens of its step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed

sys.path.insert(0, str(Path(__file__).parents[3]))

from torch import Tensor
from trl import GRPOTrainer

import ds_parity
from tools.migrations.common import Found, arguments, launched, say
from tools.migrations.trl_grpo.before import GAS, PER_GENERATION, STEPS
from tools.migrations.trl_grpo.task import ended, trainer_of, watched

CONFIG = Path(__file__).with_name("ds_config.json")
BY_STEP = "by-step"


class ByStep(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """TRL's trainer with `loss_type="dapo"`, whose denominator is the number of tokens of the optimizer step itself."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        gas, together = self.current_gradient_accumulation_steps, self.args.steps_per_generation
        first = self._step % together // gas * gas
        tokens = sum(one["completion_mask"].sum() for one in self._buffered_inputs[first : first + gas])
        tokens = self.accelerator.gather(tokens).sum()
        # TRL takes it for the tokens of the whole generation batch, and scales it down to one step.
        loss: Tensor = super()._compute_loss(model, {**inputs, "num_items_in_batch": tokens * together / gas})
        return loss


def train(config: Found, loss: str, probe: bool = False, trace: Path | None = None) -> list[Found]:
    """Train, and return the steps."""
    if loss == BY_STEP:
        kind = watched(ByStep, probe, trace, config)
        with ds_parity.install():
            return ended(trainer_of(kind, config, "dapo", STEPS, GAS, PER_GENERATION, probe))
    kind = watched(GRPOTrainer, probe, trace, config)
    with ds_parity.install(normalise="token"):
        return ended(trainer_of(kind, config, loss, STEPS, GAS, PER_GENERATION, probe))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, loss=("bnpo", "TRL's loss_type, or by-step"))
    deepspeed.init_distributed()
    say("after", train(given.config, given.loss, given.probe, given.trace))


if __name__ == "__main__":
    sys.exit(launched(main))
