"""Rollouts, the micro-batches that they are cut into, and the plan that cuts them. Light: no torch."""

from ds_parity.planning.planner import Plan, WindowPlan, fewest_passes, plan
from ds_parity.planning.records import MicroBatch, Rollout

__all__ = ["MicroBatch", "Plan", "Rollout", "WindowPlan", "fewest_passes", "plan"]
