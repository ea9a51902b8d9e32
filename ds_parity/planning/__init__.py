"""Rollouts, the micro-batches that are made of them, and the plan of which runs where. Without torch."""

from ds_parity.planning.advantages import group_advantages
from ds_parity.planning.costs import Cost
from ds_parity.planning.planner import plan
from ds_parity.planning.plans import Plan, WindowPlan, fewest_passes
from ds_parity.planning.rollout import MicroBatch, PreferencePair, Rollout, Unit
from ds_parity.planning.turns import by_turn

__all__ = [
    "Cost",
    "MicroBatch",
    "Plan",
    "PreferencePair",
    "Rollout",
    "Unit",
    "WindowPlan",
    "by_turn",
    "fewest_passes",
    "group_advantages",
    "plan",
]
