"""scheduler-budget-in-passes: stepped once a step, its budget counted in passes: the LR crosses 1/n of its curve."""

from __future__ import annotations

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop


class SchedulerBudgetInPasses(Loop):
    """The engine with this fault."""

    name = "scheduler-budget-in-passes"
    seen = "a vision-encoder trainer, PR #82"
    scenario = "uniform"

    def of_engine(self) -> Scenario:
        """Plan the schedule in passes."""
        passes = self.settings.passes // self.wanted.ranks
        section = self.wanted.config["scheduler"]
        steps = section["params"]["warmup_num_steps"] * passes
        return self.configured(scheduler={**section, "params": {**section["params"], "warmup_num_steps": steps}})
