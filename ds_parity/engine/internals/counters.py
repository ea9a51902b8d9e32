"""DeepSpeed's counters, kept at what was consumed: it adds its fixed `train_batch_size` in every step.

Read in DeepSpeed 0.19.8 (engine.py `_take_model_step`, utils/timer.py `ThroughputTimer`) and guarded in
tests/engine/test_internals.py. What they mean:

- `micro_steps`: passes. DeepSpeed counts calls of its `step()`, and forgets them in a checkpoint;
- `global_samples`: rollouts of the windows that were closed;
- `global_steps`: steps that the optimizer was asked for, `skipped_steps` those of them that an fp16 overflow stopped. A
  window without weight, or dropped, asks for none and is in neither;
- `tput_timer`: rollouts a second.
"""

from __future__ import annotations

from typing import Any

from ds_parity.engine.internals.surface import Engine
from ds_parity.window import Ledger, Rules


class Counters:
    """Puts the counters of a DeepSpeed engine right, without a clock or a wait of its own.

    The timer starts to measure after two steps, at a forward, and ends at a `step()`. So the rollouts that belong to
    its seconds are those of the windows that end while it has a start time; they wait in `_current` until the timer
    closes its step, which it doesn't in a window without a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timed = 0
        self._current = 0
        engine.tput_timer.avg_samples_per_sec = self.rollouts_per_second

    def rollouts_per_second(self) -> float:
        """Return the rollouts of all timed windows over their seconds; -inf, as DeepSpeed has it, before the first."""
        seconds: float = self._engine.tput_timer.total_elapsed_time
        return self._timed / seconds if self._timed and seconds else float("-inf")

    def consumed(self, rollouts: int) -> None:
        """Count the rollouts of a window that ends: to be called before DeepSpeed's `step()`, where it has one."""
        timer = self._engine.tput_timer
        if timer.start_time > 0:
            self._timed += rollouts
            self._current += rollouts
            # The line that DeepSpeed logs divides this by the seconds of the step.
            timer.batch_size = self._current

    def before_step(self, before: int, rollouts: int) -> None:
        """Let DeepSpeed's `step()` end at, and show, the rollouts consumed.

        Args:
            before: rollouts of the windows before this one.
            rollouts: of this one.
        """
        self.consumed(rollouts)
        self._engine.global_samples = before + rollouts - self._engine.train_batch_size()

    def settle(self, ledger: Ledger) -> None:
        """Say what has been consumed, after a window's end or a load."""
        engine = self._engine
        engine.global_samples = ledger.rollouts
        engine.micro_steps = ledger.passes  # finish() steps without a pass
        if engine.tput_timer.step_elapsed_time == 0:
            self._current = 0

    def state_of_bare(self, rules: Rules) -> dict[str, Any]:
        """Return the state of a ledger, as far as it follows from the counters that bare DeepSpeed has loaded.

        Every step that bare DeepSpeed applied is one nominal step: its scheduler stands there.
        """
        engine = self._engine
        applied = (engine.global_steps - engine.skipped_steps) * rules.target
        return {
            "target": rules.target,
            "count": rules.count,
            "passes": engine.micro_steps,
            "windows": engine.global_steps,
            "consumed": applied,
            "origin": applied,
            "rollouts": engine.global_samples,
            "progress_units": applied,
        }
