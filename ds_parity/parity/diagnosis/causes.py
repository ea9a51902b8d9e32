"""Causes by name: to which class each belongs, and what puts it right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ds_parity.parity.diagnosis.fits import Fit

REMEDIES = {
    "boundary-off-by-one": "count each pass when it has run, and before testing for the boundary, or let "
    "engine.backward() decide",
    "boundary-a-pass-late": "end a window with the pass that reaches the target, not with the one after it",
    "step-in-mid-window": "step at the boundary only, and interrupt a run between windows",
    "step-per-pass": "step at the boundary only; ds_parity's step() may follow every backward()",
    "local-count": "compare the count of all ranks with the target, not each rank's own",
    "counter-drift": "keep one counter: don't let the engine's own gradient_accumulation_steps run beside the loop's",
    "equality-boundary": "close a window with >=, not with ==",
    "another-target": "end the windows of both runs at the same number of rollouts (gradient_accumulation_passes, "
    "train_batch_size), counted in the same unit (ds_parity.count)",
    "another-overshoot": "carry what a window has beyond its target into the next one in both runs, or in neither "
    "(ds_parity.overshoot)",
    "partial-window-leak": "settle the last window at the end of the data (engine.finish())",
    "indivisible-batch": "don't drop the tail: let the last window be short (ds_parity.last_window: step)",
    "sequences-as-prompts": "count prompts where the target is one of prompts (ds_parity.count: prompt)",
    "sp-double-count": "count each rollout once, and a micro-batch once for all ranks that share it (pass the "
    "sequence-parallel mpu)",
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
    "schedule-too-short": "plan the LR schedule for as many steps as the reference does",
    "scheduler-stepped-often": "step the scheduler once: by the engine or by the loop, not by both",
    "schedule-off-by-steps": "load the scheduler's position, and step it after the optimizer, from the first step on",
    "schedule-too-long": "plan the schedule for the number of optimizer steps that the run takes",
    "another-lowest-lr": "give both schedules the same lowest learning rate, at the end and where warm-up begins",
    "another-highest-lr": "give both schedules the same highest learning rate",
    "another-warm-up": "give both schedules the same number of warm-up steps",
    "no-scheduler": "give the scheduler to the engine, and step it",
    "lr-rounded": "set the learning rate with all of its digits",
    "group-lr": "give the parameter groups the same learning rates, in the same order",
    "base-lr": "give both runs the same learning rate",
    "dp-mean-left-in": "multiply the loss by the data-parallel size: DeepSpeed averages over ranks",
    "gas-scaled-twice": "pass scale_wrt_gas=False, or don't divide by the number of passes yourself",
    "divided-already": "divide once: give plain mean losses, or say that they are divided (ds_parity.loss_weight: "
    "divided)",
    "sum-over-ranks": "say what became of the ranks when the loss was divided (ds_parity.across_ranks: mean or sum)",
    "weight-left-out": "give a weight to every backward() of every rank (ds_parity.loss_weight: weight refuses others)",
    "sp-factor-by-stage": "ZeRO 3 averages over sequence-parallel ranks too, other stages don't: correct for the stage",
    "another-divisor": "look for what the loss of a whole step is divided by, beside the total of its window",
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
    "first-passes-lost": "look for what drops the first backwards of a window: zero_grad(), or a boundary flag that is "
    "left True (with CPU offload DeepSpeed then keeps all backwards but the first)",
    "last-pass-lost": "look for what keeps the window's last backward out of the step, such as a reduction before it",
    "rank-left-out": "look for a rank whose gradients are not reduced, or whose loss is 0",
    "gradient-not-zeroed": "set gradients to zero after every step",
    "weighed-by-another-unit": "weigh each micro-batch's mean by the units that the configuration names "
    "(ds_parity.loss_weight)",
    "divided-by-trainer": "have the engine divide by what the step contains: ds_parity.install(normalise=...)",
    "mask-left-out": "apply the loss mask, in the numerator and in the denominator",
    "advantages-left-out": "multiply each token's loss by the advantage of its rollout",
    "late-boundary": "set the boundary flag before the last backward, not before step()",
    "sticky-boundary": "reset the boundary flag after step(), before the next backward",
    "mid-window-checkpoint": "save between windows: gradients of an open one are not in a checkpoint",
    "idle-nan": "silence an idle pass with zeros in place of its gradients: 0 * NaN is NaN",
    "zero-denominator": "a micro-batch without tokens weighs 0: don't divide by its count",
    "implicit-clip": "write gradient_clipping out: DeepSpeed's default became 1.0 with 0.19.1",
    "clipping-left-out": "write the same gradient_clipping in both configurations",
    "clip-at-wrong-scale": "clip the gradient after it was divided by the total, once a step",
    "adam-without-bias-correction": "give both optimizers the same bias_correction",
    "adam-step-count": "load the whole state of Adam with the checkpoint, its count of steps too",
    "lr-in-use": "log the learning rate that the optimizer has in step(), and set it before",
    "weight-decay": "give both optimizers the same weight decay, and the same groups with it",
    "weights-scaled-by-hand": "let the optimizer alone change weights: something else scales all of them",
    "weights-of-the-step-before": "load the checkpoint of the step that the run goes on from, weights and all",
    "weights-in-bf16": "keep the weights that the optimizer steps in fp32",
    "update-lost": "run the optimizer in every step",
    "momentum": "give both optimizers the same momentum, dampening and betas",
    "initial-weights": "load the same initial weights, in the same precision",
    "mixed-weights": "average the loss over the same units that weigh it: tokens with tokens, rollouts with rollouts",
    "unmasked-numerator": "mask the tokens in the numerator that are not in the denominator",
    "global-metadata": "slice advantages and ids with their rows",
    "shared-padding": "give every idle pass inputs of its own; don't change a micro-batch in place",
    "data-or-seed": "compare seeds, initial weights and the order of the data first",
    "lr-reported-a-step-off": "log the LR before the scheduler moves: afterwards it is the next step's",
    "reported-loss": "log the mean of the losses that were trained on, by weight over ranks (engine.last_step.loss)",
    "loss-with-this-gradient": "compare the functions that are minimised: a constant, or a ratio of a probability to "
    "itself, changes the loss and leaves its gradient",
    "reported-norm": "log the gradient norm that the engine gives, before clipping (engine.get_global_grad_norm())",
    "reported-lr": "log the learning rate that the optimizer has in step()",
    "reported-metric": "log the mean over samples of all ranks (engine.record)",
    "reported-counts": "log the counts of all ranks, of what carries loss (engine.last_step)",
    "metrics-mean-of-ranks": "average the reported loss by weight over ranks (engine.last_step.loss)",
    "returned-loss-scaled": "log the loss of the forward, not what backward() returns",
    "accuracy-of-means": "average samples, not means of micro-batches (engine.record)",
    "nan-in-metric-reduce": "leave ranks without samples out of the metric",
    "reset-gated-by-logging": "reset the window's statistics with every step, logged or not",
}

CLASSES = ("data", "loss", "gradient", "clipping", "optimizer settings", "schedule", "weights", "logging")
"""Where a fault can be: what micro-batches contain; the function that is minimised; what is done to its gradient,
denominators included; clipping; the optimizer's settings and state; the learning rate; weights that something else than
the optimizer's step changed; the trace itself."""

_OF_CLASS = {
    "loss": (
        "mixed-weights", "unmasked-numerator", "mask-left-out", "advantages-left-out", "term-by-another",
        "term-of-last-window", "loss-with-this-gradient",
    ),
    "clipping": ("implicit-clip", "clipping-left-out", "clip-at-wrong-scale"),
    "optimizer settings": (
        "weight-decay", "resume-loses-optimizer", "group-lr", "adam-without-bias-correction", "adam-step-count",
        "momentum",
    ),
    "schedule": (
        "scheduler-per-pass", "scheduler-budget-in-passes", "scheduler-per-outer-step", "scheduler-on-skipped-step",
        "scheduler-per-dynamic-step", "scheduler-stepped-often", "schedule-off-by-steps", "schedule-too-long",
        "schedule-too-short", "no-scheduler", "base-lr", "lr-rounded", "resume-resets-schedule", "lr-in-use",
        "another-lowest-lr", "another-highest-lr", "another-warm-up",
    ),
    "weights": (
        "weights-scaled-by-hand", "weights-in-bf16", "initial-weights", "weights-of-the-step-before", "update-lost",
    ),
    "logging": (
        "lr-reported-a-step-off", "metrics-mean-of-ranks", "returned-loss-scaled", "accuracy-of-means",
        "nan-in-metric-reduce", "reset-gated-by-logging", "reported-loss", "reported-norm", "reported-lr",
        "reported-metric",
        "reported-counts",
    ),
    "gradient": (
        "dp-mean-left-in", "gas-scaled-twice", "divided-already", "sum-over-ranks", "weight-left-out",
        "sp-factor-by-stage", "constant-factor",
        "another-divisor", "idle-counted", "target-not-actual", "wrong-window", "running-total",
        "mean-of-micro-batches", "half-broadcast", "aux-term-scaled-apart", "last-backward-only",
        "last-backward-by-caller", "late-boundary", "sticky-boundary", "first-passes-lost", "last-pass-lost",
        "rank-left-out", "gradient-not-zeroed", "weighed-by-another-unit", "mid-window-checkpoint", "idle-nan",
        "zero-denominator", "divided-by-trainer",
    ),
}  # fmt: skip
_KINDS = {name: kind for kind, names in _OF_CLASS.items() for name in names}


def kind_of(name: str) -> str:
    """Return the class of a cause; what ends windows elsewhere, or fills them otherwise, is `data`."""
    return _KINDS.get(name, "data")


@dataclass(frozen=True, slots=True)
class Cause:
    """Something from which the record of both runs follows.

    Attributes:
        name: of the fault; a key of `REMEDIES`.
        fit: what of the record it predicts.
        evidence: the numbers, in a sentence. Causes with the same evidence can't be told apart by the record.
    """

    name: str
    fit: Fit
    evidence: str

    @property
    def likelihood(self) -> float:
        """How often a cause with such a fit was right; see `Fit`."""
        return self.fit.likelihood

    @property
    def remedy(self) -> str:
        """What puts it right, in a sentence."""
        return REMEDIES[self.name]

    @property
    def kind(self) -> str:
        """The class that it belongs to; one of `CLASSES`."""
        return kind_of(self.name)


def as_one_group(causes: Sequence[Cause]) -> list[Cause]:
    """Return causes that give the same record, so that none is likelier than another: each has the evidence of all."""
    said = "; or ".join(dict.fromkeys(cause.evidence for cause in causes))
    return [replace(cause, evidence=said) for cause in causes]


def grouped(causes: Iterable[Cause]) -> tuple[tuple[Cause, ...], ...]:
    """Return causes in groups that the traces cannot tell apart: those that rest on the same evidence.

    Args:
        causes: the likeliest first, as `diagnose` returns them; groups, and the causes in them, keep that order.
    """
    groups: dict[str, list[Cause]] = {}
    for cause in causes:
        groups.setdefault(cause.evidence, []).append(cause)
    return tuple(map(tuple, groups.values()))
