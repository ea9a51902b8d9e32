"""What the faults share: where a loop can be changed, and what a scenario needs for a fault to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param
from torch import Tensor

from ds_parity.collation import collate
from ds_parity.parity.running.layouts import Passes
from ds_parity.parity.running.own_batches import Record
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.oracle import windows_of
from ds_parity.planning.rollout import MicroBatch, Rollout
from ds_parity.trace import StepRecord

Values: TypeAlias = Mapping[str, Any]

EOS = 257
SPACE = 32

ADAMW_LR = 0.002


class Fault(Loop):
    """A loop with one fault.

    Attributes:
        truth: what is wrong, as a user would want to be told.
        kind: what it belongs to: `data` (what the micro-batches hold), `loss` (the function that is minimised, the
            model's forward included), `gradient` (between the loss and the clip, denominators included), `clipping`,
            `optimizer settings` (its state included), `schedule`, `weights` (changed by something else than the
            optimizer's step, or not by it), or `logging` (only the trace is wrong). It says where the fault was made:
            a wrong mask or advantage is `data` in the micro-batch and `loss` in the loss, and either word describes it.
        needs: what the scenario must have for the fault to show; `fitted` gives it that.
    """

    truth: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    needs: ClassVar[Values] = {}

    def before_step(self) -> None:
        """Change what the step is about to use; the window's gradient is complete."""

    def after_step(self) -> None:
        """Change what the step has left behind."""

    def written(self, line: StepRecord) -> StepRecord:
        """Return the line as it is written to the trace; called on every rank."""
        return line

    def close(self, number: int, record: Record) -> None:
        """Step and write down, with the changes."""
        if self.window.total:
            self.before_step()
        super().close(number, lambda line, module: record(self.written(line), module))

    def move(self, applied: bool) -> None:
        """Move the scheduler, and then change what the step has left."""
        super().move(applied)
        if applied:
            self.after_step()


class OwnLoss(Fault):
    """A loop whose model computes its loss here; unchanged, it is the bundled one."""

    def __init__(self, wanted: Scenario) -> None:
        super().__init__(wanted)
        self.module = self.engine.module
        self.plain = self.module.objective == "nll"
        self.by_rollout = self.module.loss_weight == "rollout"
        self.module.forward = self.forward

    def forward(self, input_ids: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of a micro-batch: (B, T) ids, (B, T - 1) mask, (B,) advantages."""
        logits = self.logits(input_ids)
        targets = input_ids[:, 1:]
        logps = self.logps(logits[:, :-1], targets)
        gains = torch.ones_like(advantages) if self.plain else self.gains(advantages)
        mask = self.mask(loss_mask, input_ids)
        return self.mean(self.of_tokens(logps, gains[:, None], targets), mask)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return (B, T, vocab)."""
        return self.module.policy(input_ids)

    def logps(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the log probability of each target."""
        return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def gains(self, advantages: Tensor) -> Tensor:
        """Return the advantages that are used."""
        return advantages

    def mask(self, mask: Tensor, input_ids: Tensor) -> Tensor:
        """Return the mask that is used."""
        return mask

    def of_tokens(self, logps: Tensor, gains: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token."""
        return -logps * gains

    def mean(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over what is scored."""
        if self.by_rollout:
            return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
        return (losses * mask).sum() / mask.sum().clamp(min=1)


class OwnBatches(Fault):
    """A loop whose micro-batches are made otherwise."""

    def changed(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, which is not that of an idle pass, as the fault leaves it."""
        return batch

    def batches(self) -> Passes:
        """Return the micro-batches of all ranks with the change."""
        return tuple(tuple(one if one.idle else self.changed(one) for one in row) for row in super().batches())


class OwnRollouts(Fault):
    """A loop whose rollouts are changed where the whole stream is known."""

    def stream(self, rollouts: list[Rollout], windows: Sequence[range]) -> list[Rollout]:
        """Return as many rollouts; `windows` are the places of those of each window."""
        return rollouts

    def batches(self) -> Passes:
        """Return the micro-batches of all ranks with the change."""
        passes = super().batches()
        places, at = [], 0
        for window in windows_of(passes, self.settings, lookahead=True):
            held = sum(len(batch.held) for row in passes[window.first : window.last + 1] for batch in row)
            places.append(range(at, at + held))
            at += held
        changed = iter(self.stream([one for row in passes for batch in row for one in batch.held], places))
        return tuple(tuple(remade(batch, [next(changed) for _ in batch.held]) for batch in row) for row in passes)


def remade(batch: MicroBatch, held: Sequence[Rollout]) -> MicroBatch:
    """Return a micro-batch of other rollouts that counts as many as before."""
    if not held:
        return batch
    made = collate(tuple(held), rollouts=batch.rollouts, prompts=batch.prompts)
    return replace(made, weight=batch.weight)


def remasked(batch: MicroBatch, mask: Tensor) -> MicroBatch:
    """Return a micro-batch that scores other tokens, and counts these."""
    return replace(batch, inputs={**batch.inputs, "loss_mask": mask}, tokens=int(mask.sum()))


def groups_of(rollouts: Sequence[Rollout]) -> dict[str, list[int]]:
    """Return the places of each prompt's rollouts."""
    places: dict[str, list[int]] = {}
    for at, rollout in enumerate(rollouts):
        places.setdefault(rollout.prompt_id, []).append(at)
    return places


def named(engine: Any, part: str) -> list[Tensor]:
    """Return the parameters whose name contains `part`."""
    return [parameter for name, parameter in engine.module.named_parameters() if part in name]


def accumulated(engine: Any) -> list[Tensor]:
    """Return the window's gradient as far as this rank holds it, to be changed in place (ZeRO 0, 1 and 2)."""
    if engine.zero_optimization_stage() == 0:
        return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    held = [part for part in engine.optimizer.averaged_gradients.values() if part is not None]
    return [one for part in held for one in ([part] if isinstance(part, Tensor) else part)]


@torch.no_grad()
def edit_weights(engine: Any, change: Callable[[Tensor], Any]) -> None:
    """Change every weight in place, elementwise (ZeRO 0, 1 and 2)."""
    if engine.zero_optimization_stage() == 0:
        for parameter in engine.module.parameters():
            change(parameter.data)
        return
    for flat in engine.optimizer.single_partition_of_fp32_groups:
        change(flat.data)
    engine.optimizer.update_lp_params()


@torch.no_grad()
def set_weights(engine: Any, values: Mapping[str, Tensor]) -> None:
    """Set some parameters by their names (ZeRO 0, 1 and 2)."""
    parameters = dict(engine.module.named_parameters())
    for name, value in values.items():
        if engine.zero_optimization_stage() == 0:
            parameters[name].data.copy_(value)
        else:
            safe_set_full_fp32_param(parameters[name], value.float())
    if engine.zero_optimization_stage():
        engine.optimizer.update_lp_params()


def weights_of(engine: Any) -> dict[str, Tensor]:
    """Return a copy of every parameter (ZeRO 0, 1 and 2)."""
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def states(engine: Any) -> list[dict[str, Any]]:
    """Return the optimizer's state of each tensor that it steps."""
    return [state for state in engine.basic_optimizer.state.values() if state]


def from_all_ranks(value: Any) -> list[Any]:
    """Return what every rank has given; collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def changed_params(config: Mapping[str, Any], section: str, **params: Any) -> dict[str, Any]:
    """Return the optimizer's or scheduler's section with other parameters."""
    return {**config[section], "params": {**config[section]["params"], **params}}


class OfOptimizer(Fault):
    """The optimizer is built with other parameters."""

    params: ClassVar[Values] = {}
    type: ClassVar[str | None] = None

    def of_engine(self) -> Scenario:
        """Return the scenario with the optimizer's section changed."""
        section = changed_params(self.wanted.config, "optimizer", **self.params)
        return self.configured(optimizer={**section, "type": self.type or section["type"]})


class OfScheduler(Fault):
    """The scheduler is built with other parameters."""

    params: ClassVar[Values] = {}

    def of_engine(self) -> Scenario:
        """Return the scenario with the scheduler's section changed."""
        return self.configured(scheduler=changed_params(self.wanted.config, "scheduler", **self.params))


def fitted(fault: type[Fault], scenario: Scenario) -> Scenario:
    """Return the scenario with what the fault needs: the clean loop and the fault both run it.

    `optimizer` and `scheduler` are types; `weight_decay` is the optimizer's; `setup` is the scenario's own.
    """
    needs, config = fault.needs, dict(scenario.config)
    if needs.get("optimizer") == "AdamW":
        params = {"lr": ADAMW_LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
        config["optimizer"] = {"type": "AdamW", "params": params}
        warmup = {"warmup_min_lr": ADAMW_LR / 2, "warmup_max_lr": ADAMW_LR}
        config["scheduler"] = changed_params(config, "scheduler", **warmup)
    if "weight_decay" in needs:
        config["optimizer"] = changed_params(config, "optimizer", weight_decay=needs["weight_decay"])
    if needs.get("scheduler") == "WarmupCosineLR":
        params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}
        config["scheduler"] = {"type": "WarmupCosineLR", "params": params}
    return replace(scenario, config=config, setup=needs.get("setup", scenario.setup))
