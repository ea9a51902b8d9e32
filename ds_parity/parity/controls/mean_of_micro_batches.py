"""mean-of-micro-batches: each micro-batch's mean weighs the same, whatever it holds.

Seen in open-instruct #1447, Transformers #34191 and verl #5625. Runs agree where micro-batches are alike.
"""

from __future__ import annotations

from typing import Any

from ds_parity.parity import candidate
from ds_parity.parity.candidate import Record
from ds_parity.parity.scenario import Scenario


def run(scenario: Scenario, record: Record) -> Any:
    """Run the scenario with one unit of weight a micro-batch in place of its rollouts or tokens."""
    section = {**scenario.config.get("ds_parity", {}), "loss_weight": "pass"}
    return candidate.run(scenario, record, config={**scenario.config, "ds_parity": section})
