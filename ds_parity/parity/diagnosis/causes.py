"""Causes by name: what was wrong where it was seen, and what puts it right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REMEDIES = {
    "boundary-off-by-one": "count the pass before testing for the boundary, or let engine.backward() decide",
    "step-per-pass": "step at the boundary only; ds_parity's step() may follow every backward()",
    "local-count": "compare the count of all ranks with the target, not each rank's own",
    "counter-drift": "keep one counter: don't let the engine's own gradient_accumulation_steps run beside the loop's",
    "equality-boundary": "close a window with >=, not with ==",
    "partial-window-leak": "settle the last window at the end of the data (engine.finish())",
    "indivisible-batch": "don't drop the tail: let the last window be short (ds_parity.last_window: step)",
    "sequences-as-prompts": "count prompts where the target is one of prompts (ds_parity.count: prompt)",
    "sp-double-count": "count a micro-batch once for all ranks that share it (pass the sequence-parallel mpu)",
    "silent-truncation": "keep every rollout; pack them with ds_parity.plan in place of dropping what doesn't divide",
    "resume-resets-window": "save the window's surplus with the checkpoint (client_state['ds_parity'])",
    "resume-resets-schedule": "load the scheduler's state with the checkpoint (load_lr_scheduler_states=True)",
    "resume-loses-optimizer": "load the optimizer's state with the weights (load_optimizer_states=True)",
    "resume-repeats-data": "save the position in the data with the checkpoint, and begin there",
    "scheduler-per-pass": "step the scheduler once an optimizer step, and not by a wrapper that steps it once a pass",
    "scheduler-budget-in-passes": "count the scheduler's budget in optimizer steps, not in passes",
    "scheduler-per-outer-step": "step the scheduler after every optimizer step, not once for several of them",
    "scheduler-on-skipped-step": "leave the scheduler where it is when a step was skipped",
    "scheduler-per-dynamic-step": "move the scheduler by what was consumed (ds_parity.lr_progress: rollout)",
    "base-lr": "give both runs the same learning rate",
    "dp-mean-left-in": "multiply the loss by the data-parallel size: DeepSpeed averages over ranks",
    "gas-scaled-twice": "pass scale_wrt_gas=False, or don't divide by the number of passes yourself",
    "divided-already": "divide once: give plain mean losses, or say that they are divided (ds_parity.loss_weight: "
    "divided)",
    "sum-over-ranks": "say what became of the ranks when the loss was divided (ds_parity.across_ranks: mean or sum)",
    "weight-left-out": "give a weight to every backward() of every rank (ds_parity.loss_weight: weight refuses others)",
    "sp-factor-by-stage": "ZeRO 3 averages over sequence-parallel ranks too, other stages don't: correct for the stage",
    "constant-factor": "look for a factor of this size: a batch size, a world size, a loss that is summed and not "
    "averaged",
    "idle-counted": "leave idle passes out of the denominator",
    "target-not-actual": "divide by what the window held, not by the target",
    "wrong-window": "divide by the total of the window itself, not of the one before",
    "running-total": "divide by the window's final total, or correct the gradient at the boundary",
    "mean-of-micro-batches": "weigh each micro-batch's mean by its rollouts or tokens",
    "half-broadcast": "sum the denominator over ranks in every unit it is needed in",
    "aux-term-scaled-apart": "divide every term of the loss by the same total",
    "term-by-another": "divide each term of the loss by the total of its own unit (ds_parity.terms)",
    "term-of-last-window": "divide each term of the loss by the total of this window (engine.expect, or "
    "ds_parity.lookahead: window)",
    "last-backward-only": "set the boundary flag to False before every backward but the window's last",
    "last-backward-by-caller": "set the boundary flag to False before every backward but the last, or let "
    "ds_parity.boundary caller do it",
    "late-boundary": "set the boundary flag before the last backward, not before step()",
    "sticky-boundary": "reset the boundary flag after step(), before the next backward",
    "mid-window-checkpoint": "save between windows: gradients of an open one are not in a checkpoint",
    "idle-nan": "silence an idle pass with zeros in place of its gradients: 0 * NaN is NaN",
    "zero-denominator": "a micro-batch without tokens weighs 0: don't divide by its count",
    "implicit-clip": "write gradient_clipping out: DeepSpeed's default became 1.0 with 0.19.1",
    "clip-at-wrong-scale": "clip the gradient after it was divided by the total, once a step",
    "optimizer": "compare the optimizers' settings: same gradient, other update",
    "mixed-weights": "average the loss over the same units that weigh it: tokens with tokens, rollouts with rollouts",
    "unmasked-numerator": "mask the tokens in the numerator that are not in the denominator",
    "global-metadata": "slice advantages and ids with their rows",
    "shared-padding": "give every idle pass inputs of its own; don't change a micro-batch in place",
    "data-or-seed": "compare seeds, initial weights and the order of the data first",
    "lr-reported-a-step-off": "log the LR before the scheduler moves: afterwards it is the next step's",
    "metrics-mean-of-ranks": "average the reported loss by weight over ranks (engine.last_step.loss)",
    "returned-loss-scaled": "log the loss of the forward, not what backward() returns",
    "accuracy-of-means": "average samples, not means of micro-batches (engine.record)",
    "nan-in-metric-reduce": "leave ranks without samples out of the metric",
    "reset-gated-by-logging": "reset the window's statistics with every step, logged or not",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that would explain the difference.

    Attributes:
        name: of the fault; a key of `REMEDIES`.
        likelihood: in (0, 1]: 0.9 where numbers fit that nothing else gives, 0.3 where it is one of several.
        evidence: the numbers, in a sentence.
    """

    name: str
    likelihood: float
    evidence: str

    @property
    def remedy(self) -> str:
        """What puts it right, in a sentence."""
        return REMEDIES[self.name]


def grouped(causes: Iterable[Cause]) -> tuple[tuple[Cause, ...], ...]:
    """Return causes in groups that the traces cannot tell apart: those that rest on the same evidence.

    Args:
        causes: the likeliest first, as `diagnose` returns them; groups, and the causes in them, keep that order.
    """
    groups: dict[str, list[Cause]] = {}
    for cause in causes:
        groups.setdefault(cause.evidence, []).append(cause)
    return tuple(map(tuple, groups.values()))
