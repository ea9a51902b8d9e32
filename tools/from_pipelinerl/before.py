"""PipelineRL's fine-tuning loop (pipelinerl/finetune_loop.py, read in 58d3934), in our words, over the bare engine.

    deepspeed --num_accelerators 2 tools/from_pipelinerl/before.py --trace before.jsonl

Quotas, sentinel batches, a gather of the counts in every pass, the boundary marked by hand, `loss * 0.0`. Two things
are put right, so that its steps are what they are meant to be; `--as-found` leaves them as they are there:

- DeepSpeed divides by `gradient_accumulation_steps`, which it is given, and by the ranks, though the loss is divided by
  the window's rollouts already: the gradient comes out too small by `gradient_accumulation_passes`;
- the tokens of a step are the first rank's, times the ranks.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from quotas import Row, deal, packed
from task import Task, arguments, rewards, say

from ds_parity.collation import collate, to_device
from ds_parity.errors import ConfigError, DsParityError
from ds_parity.planning import Rollout
from ds_parity.trace import Header, StepRecord, TraceWriter
from ds_parity.trace.heading import header

SENTINEL = Rollout("sentinel", tokens=(2,) * 8, prompt_length=8)


class Recipe:
    """The bare engine, driven by quotas.

    Args:
        engine: the bare engine.
        target: rollouts of a window, over all ranks.
        scheduler: moved by hand.
        layout: `packed` or `padded`.
        as_found: with the faults.

    Attributes:
        passes: so far.
        sentinels: idle passes among them, over all ranks.
    """

    def __init__(
        self, engine: Any, target: int, scheduler: Any = None, layout: str = "packed", as_found: bool = False
    ) -> None:
        self.engine, self.target, self.layout = engine, target, layout
        self._scheduler, self._as_found = scheduler, as_found
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._device = get_accelerator().current_device_name()
        self._local = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._all = [torch.zeros_like(self._local) for _ in range(self._ranks)]
        self._goal = target
        self.passes = self.sentinels = 0
        self._forget()

    def window(self, rows: Iterable[Row]) -> None:
        """Take one optimizer step; `rows` are the rollouts of each rank, pass by pass."""
        self._forget()
        for row in rows:
            self.passes += 1
            self.sentinels += row.count([])
            self._run(row[self._rank])

    def _run(self, rollouts: Sequence[Rollout]) -> None:
        batch = to_device(collate(rollouts or [SENTINEL], layout=self.layout), self._device)
        self._local += len(rollouts)
        dist.all_gather(self._all, self._local)
        last = sum(int(count.item()) for count in self._all) == self._goal
        loss = self.engine(**batch.inputs) * (1 / self.target)
        if rollouts:
            self.losses.append(loss.item())
            self.rewards += rewards(rollouts).tolist()
            self.tokens += batch.tokens
        else:
            loss = loss * 0.0
        self.engine.set_gradient_accumulation_boundary(last)
        if self._as_found:
            self.engine.backward(loss)
        else:
            self.engine.backward(loss * self._ranks, scale_wrt_gas=False)
        if last:
            self._step()

    def _step(self) -> None:
        self._goal += self.target
        self.engine.set_gradient_accumulation_boundary(True)
        self.lr = tuple(self.engine.get_lr())
        self.engine.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def _forget(self) -> None:
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self.tokens = 0
        self.lr: tuple[float, ...] = ()

    def record(self, step: int) -> StepRecord:
        """Return the trace's line of the step just taken; collective. Passes are not in it: PipelineRL counts none."""
        gathered: list[Any] = [None] * self._ranks
        dist.all_gather_object(gathered, (self.losses, self.rewards, self.tokens))
        losses, rewarded, tokens = zip(*gathered, strict=True)
        norm = self.engine.get_global_grad_norm()
        return StepRecord(
            step=step,
            passes=None,
            idle_passes=None,
            rollouts=sum(map(len, rewarded)),
            prompts=None,
            tokens=tokens[0] * self._ranks if self._as_found else sum(tokens),
            total=float(self.target),
            loss=sum(map(sum, losses)),
            lr=self.lr,
            grad_norm=None if norm is None else float(norm),  # ZeRO 0 in fp32 keeps none
            metrics={"reward": sum(map(sum, rewarded)) / self.target},
        )


def train(task: Task, as_found: bool = False) -> Any:
    """Train; returns the engine."""
    ranks = dist.get_world_size()
    plain = _plain(task, ranks)
    model, optimizer, scheduler = task.build()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=plain)
    recipe = Recipe(engine, task.target, scheduler, as_found=as_found)
    writer = TraceWriter(task.trace, _header(task, ranks)) if dist.get_rank() == 0 else None
    for step, window in enumerate(task.windows(), start=1):
        recipe.window(deal(window, ranks, packed(task.max_tokens)))
        record = recipe.record(step)
        if writer is not None:
            writer.write(record)
    if writer is not None:
        writer.close()
    say("as found" if as_found else "before", engine, recipe.passes, recipe.sentinels)
    return engine


def _plain(task: Task, ranks: int) -> dict[str, Any]:
    passes, own = task.settings.gradient_accumulation_passes, ("gradient_accumulation_passes", "ds_parity")
    if passes % ranks:
        raise ConfigError(
            f"gradient_accumulation_passes = {passes}: quotas must be equal, so {ranks} ranks must divide it"
        )
    batch = {"gradient_accumulation_steps": passes // ranks, "train_batch_size": task.target}
    return {key: value for key, value in task.config.items() if key not in own} | batch


def _header(task: Task, ranks: int) -> Header:
    known = ("rollouts", "tokens", "total", "loss", "lr", "grad_norm", "metrics")
    accelerator = get_accelerator()
    device = f"{accelerator.device_name()} {accelerator.communication_backend_name()}"
    line = header("training", task.config, engine="PipelineRL's loop", ranks=ranks, device=device)
    return line.model_copy(update={"records": known})


def main(argv: Sequence[str] | None = None) -> int:
    """Read the arguments and train; 2 for bad input."""
    try:
        task, given = arguments(__doc__, argv, as_found="leave the faults in")
        deepspeed.init_distributed()
        train(task, given.as_found).destroy()
    except DsParityError as error:
        print(f"before.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
