"""The proxy: a DeepSpeed engine whose `backward` and `step` count rollouts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, Literal, SupportsIndex, TypeVar

import torch
import wrapt

from ds_parity.config import Settings
from ds_parity.engine import checkpoint
from ds_parity.engine.arguments import chunk_of, refuse_name_of_term, refuse_scaling
from ds_parity.engine.callers_driver import CallersDriver
from ds_parity.engine.division import Loss
from ds_parity.engine.driver import Driver
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.measuring import measured
from ds_parity.engine.passes import PassQueue
from ds_parity.engine.preconditions import refuse_no_loss
from ds_parity.engine.proxying import METHODS
from ds_parity.engine.ranks.gathered_advantages import gathered_advantages
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.engine.saving import Saving
from ds_parity.engine.writers import Writer
from ds_parity.errors import WindowError
from ds_parity.planning import Cost, MicroBatch
from ds_parity.trace import StepRecord
from ds_parity.window import Window

Batch = TypeVar("Batch")


class ParityEngine(wrapt.ObjectProxy[Any]):
    """A transparent proxy of a DeepSpeed engine: `isinstance(engine, deepspeed.DeepSpeedEngine)` holds.

    Everything that is not defined here is DeepSpeed's own. What differs:

    - `backward` takes the counts of its micro-batch, divides the loss by the window's total and marks the boundary;
    - `step` updates at the boundary only, and must follow every `backward`, unless the caller ends windows by it;
    - `zero_grad`, also of the optimizers, does nothing inside a window: its gradients have been counted;
    - `step` of the optimizers raises `WindowError` where it is called by itself: `engine.step()` calls it;
    - `passes`, `idle`, `record`, `finish`, `stop`, `stopping`, `group_advantages`, `measure_cost`, `window` and
      `last_step` are new;
    - what would move the boundary behind its back (`set_gradient_accumulation_boundary`, `set_train_batch_size`,
      `set_train_micro_batch_size`, `coalesce_grad_reduction`) raises `WindowError`, unless the caller ends windows.
    """

    def __init__(self, engine: Engine, settings: Settings, sequence: int = 1, number: int = 1) -> None:
        super().__init__(engine)
        self._self_settings = settings
        self._self_writer = Writer()
        kind = CallersDriver if settings.by_caller else Driver
        self._self_driver: Driver = kind(engine, settings, chunk_of(settings.lookahead), sequence, number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            WindowError: on ZeRO 3, a parameter came after the engine was built, torch.compile() gave the model, another
                engine over it fetches its weights ahead, or ranks have run other modules.
            ConfigError: the model has DeepSpeed's MoE layer, and another engine has brought an mpu since.
            RankDesyncError: another rank ended, or did not come in time.
        """
        self._self_driver.before_forward()
        with self._self_driver.waiting("a forward"):
            try:
                returned = self.__wrapped__(*args, **kwargs)
            except (AttributeError, RuntimeError, AssertionError) as error:
                self._self_driver.explain_forward(error)
                raise
        self._self_driver.adapter.moved.remember(returned)
        return returned

    # The pass.

    def backward(
        self,
        loss: Loss,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        rollouts: SupportsIndex | None = None,
        prompts: SupportsIndex | None = None,
        tokens: SupportsIndex | None = None,
        weight: Any = None,
    ) -> torch.Tensor:
        """Run backward on the loss of one micro-batch and count what it contained.

        Waits for the counts of the other ranks, which decide whether this pass is the boundary, and never for the
        accelerator; on ZeRO 0 and 1 behind DeepSpeed's backward, but for a window's first pass. Where the caller ends
        windows it waits in the first one alone.

        Losses are divided by the expected total, so the gradient that `p.grad` (ZeRO 0) or DeepSpeed's
        `safe_get_full_grad` shows between the boundary's `backward()` and its `step()` is that of the step only once it
        is multiplied by `engine.window.correction`. What `safe_set_full_grad` puts in its place must be divided by it.

        With sequence parallelism every rank of a group gives the counts and the loss of the whole micro-batch, gathered
        from the group with a differentiable all-gather as in DeepSpeed's ALST tutorial (docs/sequence_parallelism.md
        has one): in value and in gradient, the micro-batch's loss is the mean of what its ranks give. A rank that gives
        only its own share, so that the shares add up to the loss, multiplies it by the group's size.

        Args:
            loss: one element, with a graph behind it; a mean over the micro-batch's weight units, or their sum
                (`loss_reduction`). In bf16 or fp16 its own type rounds its coefficient: compute it in fp32. The forward
                may have been `engine(x)` or `engine.module(x)`, and may lie several passes back in the same window.
            retain_graph: as in DeepSpeed.
            scale_wrt_gas: accepted for unchanged loops; must be True.
            rollouts: rollouts contained (>= 0); `train_micro_batch_size_per_gpu` where it isn't given, so that an
                unchanged DeepSpeed loop runs. A loop that gives a count in one pass gives it in every later one, but
                for idle passes: one that is forgotten is refused.
            prompts: prompts finished (>= 0); required for `count: prompt`, else 0 where it isn't given.
            tokens: loss tokens contained (>= 0); required for `loss_weight: token`. Each count may be an int, or a
                whole-numbered tensor of one element on the CPU (`tokens=mask.sum()`, `int(mask.sum())` of a mask of
                floats). One on an accelerator is refused, because reading it would wait: count before the
                micro-batch is moved there.
            weight: what the loss weighs (finite and >= 0): required for `loss_weight: weight`, refused elsewhere. The
                step is sum(weight * gradient) / sum(weight) over all ranks and passes. With terms: weights by their
                names, for those whose own weight is `weight`.

        Returns:
            The loss as it was accumulated: divided, and 0 where its weight is 0.

        Raises:
            WindowError: a count is negative, not whole, on an accelerator, missing (it is required, or earlier passes
                gave it), or contradicts what `passes` announced; the window waits for its `step()`; the loss is none;
                its forward ran before the last step;
                or gradients were changed outside of `backward`, or belong to a parameter that the engine was not built
                with.
            RankDesyncError: ranks are not in the same pass, or give different counts of one micro-batch.
        """
        refuse_scaling(scale_wrt_gas)
        driver: Driver = self._self_driver
        refuse_no_loss(driver, loss)
        terms = loss.keys() if isinstance(loss, Mapping) else None
        counts = driver.counts_given(rollouts, prompts, tokens, weight, terms)
        with self._self_driver.waiting("backward()"):
            scaled: torch.Tensor = driver.run_pass(loss, counts, retain_graph=retain_graph)
        return scaled

    def expect(
        self,
        *,
        rollouts: SupportsIndex | None = None,
        prompts: SupportsIndex | None = None,
        tokens: SupportsIndex | None = None,
        passes: SupportsIndex | None = None,
        weight: Any = None,
    ) -> None:
        """Say what this rank's next window will contain, so that its losses are divided by the right totals at once.

        Every rank calls it between windows; one exchange. Terms of different units need it, unless `passes` looks ahead
        over whole windows. A window that then contains anything else is a `WindowError` on every rank, in place of its
        step.

        Args:
            rollouts: that this rank's micro-batches of the window contain together (>= 0).
            prompts: likewise.
            tokens: likewise.
            passes: micro-batches of this rank that are not idle (>= 0).
            weight: what they weigh together (finite and >= 0), or weights by the names of terms: of those whose weight
                is `weight`, or that are not in every micro-batch.

        Raises:
            WindowError: a window is open, a number is wrong, or one that the loss is weighed by is missing.
            RankDesyncError: ranks are out of sync, or not all say the same numbers.
        """
        with self._self_driver.waiting("expect()"):
            self._self_driver.expect(passes, weight, rollouts=rollouts, prompts=prompts, tokens=tokens)

    def idle(self, loss: torch.Tensor) -> torch.Tensor:
        """Run an idle pass: a real backward that contributes exactly nothing, also where `loss` is inf or NaN.

        Args:
            loss: scalar of any micro-batch, attached to every parameter that other ranks' losses are attached to.
        """
        return self.backward(loss, rollouts=0, prompts=0, tokens=0)

    def step(self, lr_kwargs: Any = None) -> None:
        """End the pass, and update at the boundary; where the caller ends windows, end the window and update.

        A gradient that is not finite takes no step, in any precision: `last_step.skipped` says so.

        Args:
            lr_kwargs: what the scheduler's `step()` is given at the boundary, by names: `{"metrics": ...}` for torch's
                ReduceLROnPlateau, with the same value on every rank.

        Raises:
            WindowError: there was no `backward` since the last `step`, or gradients were changed outside of it; or the
                scheduler does not take what it is given, or needs what it is not given.
            RankDesyncError: the learning rates of the ranks differ, or they take their micro-batches from different
                plans: the window is then to be thrown away (`load_checkpoint`).
        """
        with self._self_driver.waiting("step()"):
            self._self_driver.step(lr_kwargs=lr_kwargs)

    def passes(
        self,
        stream: Iterable[Batch],
        *,
        lookahead: int | Literal["window"] | None = None,
        idle: Any = None,
        finish: bool = True,
        skip_idle: bool = True,
        prefetch: int = 0,
    ) -> Iterator[Batch]:
        """Yield this rank's micro-batches, and idle passes where it has run out of data and others have not.

        Every rank is handed the pass that closes a window, and the first pass of each. On ZeRO 0 and 1, which are
        silent between boundaries, other idle passes are counted and not handed out: neither forward nor backward runs.
        So keep what all ranks do together behind the boundary, or give `skip_idle=False`.

        What runs in an idle pass is a stand-in: a copy of a micro-batch that counts nothing and says so. Its `idle` is
        True and its `rollouts`, `prompts` and `tokens` are 0 (divide by `max(1, tokens)`); inputs, and all else, are
        those of the micro-batch, and it is an instance of its class. So a loop may train another engine with it:
        `critic.backward(loss, rollouts=one.rollouts, tokens=one.tokens)`. Micro-batches of your own class that are not
        idle are handed out as they are, and need no `idle`: ask `getattr(one, "idle", False)`.

        Nothing that was handed out is kept, but for the inputs of the smallest micro-batch so far, where they are: on
        the accelerator, if the stream has moved them there. Besides it, those are alive that were read ahead (at most
        2 * lookahead - 1), and what the loop itself holds. What is read ahead is not copied: yield a new micro-batch
        each time, and no buffer that is filled anew.

        A loop that leaves it early (`break`, an exception) loses the micro-batches that were read ahead: they are gone
        from the stream, and no pass has run them. To leave without a loss, call `stop()` and go on to the boundary with
        the look-ahead 0 or 1; with a greater one, what is read ahead of that boundary is lost too, so keep it in the
        stream's hands (a list, a plan) until its window is closed. After a `stop()` was seen, every later `passes()` of
        this engine yields nothing.

        Args:
            stream: micro-batches of this rank (`MicroBatch`, or anything with `rollouts`, `prompts` and `tokens`); may
                be endless or arrive as it is produced. One that contains nothing (counts of 0) is an idle pass, and
                runs its own inputs; where these are None or empty, the rank's smallest micro-batch so far stands in.
            lookahead: passes whose counts are exchanged together, in place of `ds_parity.lookahead`; the same on every
                rank; 0 to 4096. With 0 there is one exchange a pass, and the next micro-batch is read only after the
                current pass.
                A window starts with so many of its passes known, all where it has no more, so the stream is read at
                most twice as far ahead.
            idle: a micro-batch that idle passes run on a rank that has had none with inputs; else its smallest is run
                again.
            finish: settle the last window when all streams have ended.
            skip_idle: False: hand every pass out to every rank, as a forward that talks to other data-parallel ranks
                (statistics of your own) or a loop that does so in every pass needs it. Of no effect on ZeRO 2 and 3,
                with a mixture of experts, or on ZeRO 1 with overlap_comm while a
                parameter has no gradient yet.
            prefetch: micro-batches that a thread makes ahead, while passes run: reading, collating and queueing the
                copy to the accelerator (`to_device`) then cost the loop nothing. So many more are alive, and lost where
                the loop is left early. What the stream raises is raised at its own pass, and the thread ends with the
                loop. A stream that draws random numbers shares torch's with the model: give it a generator of its own.
                If they are at least as many as the look-ahead, and made on every rank by then, their counts travel with
                the sum of the step before them: a window costs one collective on the host.

        Raises:
            WindowError: a rank has nothing to run in an idle pass, or a micro-batch got no backward; the stream can't
                be iterated, what it yields has no counts (a tuple or a dict of a DataLoader), or `lookahead` or
                `prefetch` is out of range.
            ConfigError: a micro-batch is part of a plan for another number of data-parallel ranks; nothing of what was
                read with it has been counted.
            RankDesyncError: ranks were given different look-aheads, or another one has raised.
        """
        ahead = self._self_settings.lookahead if lookahead is None else lookahead
        driver: Driver = self._self_driver
        queue = PassQueue(driver, stream, ahead, idle, skip_idle=skip_idle, prefetch=prefetch)
        queue.upcoming.settles = finish
        with closing(queue), driver.given.taking_from(queue.upcoming):
            yield from queue
        if finish and not self.stopping:
            self.finish()

    def finish(self, lr_kwargs: Any = None) -> StepRecord | None:
        """Settle the last window as `ds_parity.last_window` says; every rank calls it. Returns the last step.

        The next data begins with a full window: a surplus of this data is forgotten, unless a `stop()` ended it.

        Args:
            lr_kwargs: what the scheduler's `step()` is given, as in `step`. A loop whose scheduler needs it gives
                `finish=False` to `passes`, and calls this behind it.

        Raises:
            WindowError: a window is open under `last_window: error`, or a `step()` is owed; or the scheduler needs what
                it is not given: the window stays open, and may be finished with it.
            RankDesyncError: not every rank has finished, or the learning rates of the ranks differ.
        """
        with self._self_driver.waiting("finish()"):
            self._self_driver.finish(lr_kwargs=lr_kwargs)
        return self.last_step

    def stop(self) -> None:
        """Ask all ranks to stop at the next boundary; from any rank, and from a signal handler.

        The request travels with the counts of the next pass. `passes` ends at the boundary after it on every rank
        alike, between windows, and hands nothing more out. Where all data end before that, the window stays open, and
        `finish()` settles it. Other loops look at `stopping`.

        It is for good: a later `passes()` of this engine yields nothing. To go on, save a checkpoint and load it into a
        new engine; where training is to go on in this one, end the stream of every rank instead.
        """
        self._self_driver.exchange.stop = True

    @property
    def stopping(self) -> bool:
        """Whether some rank has called `stop`, as every rank knows it from the same pass on."""
        stopping: bool = self._self_driver.exchange.stopping
        return stopping

    def record(self, name: str, value: Any, weight: Any = None) -> None:
        """Add to a metric of the open window: sum(weight * value) / sum(weight).

        The sums run over all data-parallel ranks and passes.

        It stands in `last_step.metrics`, the trace and the monitors once the window is closed: call it between a pass's
        start and its `step()` (after the `step()` that closes a window it counts for the next one). Ranks may record
        different names, or none. Costs no collective of its own, because it travels with the loss in the one sum of a
        step, but for the first step that holds a name on some rank: a gather and, on CPUs, a sum. A name that no rank
        has recorded for 64 to 127 windows is forgotten, and new when it comes back; so leave what changes (a step's
        number, a prompt's id) out of names. In an idle pass of `passes` it does nothing; leave it out where you call
        `idle`. Never waits for the accelerator.

        May be called from any thread, and no number is lost. It counts for the window that is open when it is called:
        while the `step()` that closes a window runs, for this one or the next; after the last window, for none. Threads
        other than the one that runs the passes measure no stand-in, so what they record counts in idle passes too.

        Args:
            name: of the metric.
            value: one number (float, or tensor of no dimension), or one a sample (1-D tensor). NaN stays NaN.
            weight: finite and >= 0: for how many units one number stands (1 where it is None), or for how many each
                sample does (1-D, as long as `value`; 1 each where it is None). What weighs 0 is not there, and a metric
                whose weights add up to 0 has no entry. A wrong weight on the accelerator isn't looked at: it makes the
                metric NaN.

        Raises:
            WindowError: name, value or weight is none of these.
        """
        queue: Upcoming | None = self._self_driver.queue
        refuse_name_of_term(self._self_settings, name)
        self._self_driver.meter.record(name, value, weight, idle=queue is not None and queue.idle)

    def group_advantages(
        self, prompt_ids: Iterable[Hashable], rewards: Iterable[float], *, by_std: bool = True
    ) -> list[float]:
        """Return this rank's advantages, (r - mean) / std over the rewards of the same prompt on all ranks (GRPO).

        What `ds_parity.group_advantages` gives for all rollouts in one list, where a prompt's lie on different ranks.
        One gather on the host; every rank calls, between windows or before training, with as many rollouts as it has.

        Args:
            prompt_ids: (n,) what was asked, by names that are the same on every rank, as in
                `ds_parity.group_advantages`.
            rewards: (n,) finite numbers.
            by_std: False: r - mean, as in Dr. GRPO.

        Raises:
            ConfigError: on some rank there are not as many rewards as prompts, a reward is no finite number, or a
                prompt can be no key or is another one on each rank; raised on every rank.
            RankDesyncError: not every rank has come within `ds_parity.exchange_timeout`.
            WindowError: the stream of `passes(prefetch=...)` calls, in its thread.
        """
        driver: Driver = self._self_driver
        with driver.waiting("group_advantages()"):
            over = driver.over_ranks("gathers rewards")
            return gathered_advantages(prompt_ids, rewards, over, driver.speaks, by_std=by_std)

    def measure_cost(
        self, micro_batches: Sequence[MicroBatch], loss: Callable[[Any, MicroBatch], torch.Tensor], repeats: int = 5
    ) -> Cost:
        """Return what passes of these micro-batches cost on the slowest rank, as `ds_parity.measure_cost` does.

        Raises:
            WindowError: a window is open, parameters are divided over ranks (ZeRO 3), or the stream of
                `passes(prefetch=...)` calls, in its thread.
            ConfigError, RankDesyncError: as `ds_parity.measure_cost` says.
        """
        driver: Driver = self._self_driver
        if driver.ledger.window.passes:
            raise WindowError(
                f"measure_cost: a window is open after {driver.ledger.window.passes} passes; measure before training, "
                "or between windows"
            )
        with driver.waiting("measure_cost()"):
            over = driver.over_ranks("measures what micro-batches cost")
            return measured(self.__wrapped__.module, micro_batches, loss, repeats, over)

    # What there is to know.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current pass ends its window.

        After `backward` it is known. Before it, it is known inside `passes` with look-ahead, and otherwise foretold as
        DeepSpeed does: as if every rank had `train_micro_batch_size_per_gpu` rollouts.

        Raises:
            WindowError: it is asked before `backward` in a loop that passes counts, which nothing can foretell.
        """
        ends: bool = self._self_driver.at_boundary()
        return ends

    @property
    def dp_world_size(self) -> int:
        """Data-parallel ranks (>= 1): as many micro-batches as a pass has. Ranks that share one count as one."""
        ranks: int = self._self_driver.ranks
        return ranks

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that read different micro-batches; `dist.get_rank` of it is this one's number.

        DeepSpeed's own where it has one. With sequence parallelism it may have none, and this one was made.
        """
        return self._self_driver.data_group

    @property
    def window(self) -> Window:
        """The window as it stands: index, passes, rollouts, prompts, tokens, target.

        Its `correction` (a float > 0) is what `step()` multiplies the accumulated gradient by. Where the caller ends
        windows it is NaN.
        """
        window: Window = self._self_driver.ledger.window
        return window

    @property
    def last_step(self) -> StepRecord | None:
        """The last finished step; reading it waits for the accelerator, unlike everything else here."""
        finished = self._self_driver.boundary.finished
        return None if finished is None else finished.record

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save between windows, with the window's state under `client_state["ds_parity"]`.

        `latest` names the checkpoint once all ranks have written their files, and changes at once: a run that is killed
        in here leaves the `latest` of before. So give every checkpoint a tag of its own.

        Raises:
            CheckpointError: a window is open: gradients of its passes would be lost; or another engine of this process
                has saved its checkpoint under the tag in that folder; or `client_state` is no mapping, or has a value
                of the caller's own under `ds_parity`, or under a name of DeepSpeed's such as `optimizer` (one that was
                loaded may be given: these are brought up to date); or a rank could not write its files, and `latest`
                names what it named before.
            RankDesyncError: another rank ended before it had saved, does something else, or saves under another tag:
                all ranks save.
        """
        options = {"names_latest": save_latest, "without_frozen": exclude_frozen_parameters}
        saving = Saving.of(self.__wrapped__, self._self_writer, save_dir, tag, **options)
        saved = checkpoint.save(self._self_driver, saving, client_state)
        self._self_writer.has_saved(save_dir, saving.tag)
        return saved

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load, and go on where the checkpoint was saved, at the start of a window.

        An open window is thrown away, unless there was nothing to load. A checkpoint of bare DeepSpeed starts a fresh
        window, said once. With `load_module_only` the counts stay as they are, like everything else but the weights.
        A universal checkpoint goes on alike on any number of ranks.

        Raises:
            CheckpointError: the checkpoint counted something else, towards another target or moved its LR otherwise, or
                another number of ranks saved it, or a parameter is frozen that was trained then; or `load_module_only`
                on ZeRO 3, where DeepSpeed loads nothing, or a part of a universal checkpoint on ZeRO 1 and 2, where
                it loads all; or a rank finds no folder of the tag, where another does.
            RankDesyncError: another rank ended before it had loaded, or does something else: all ranks load; or ranks
                load different checkpoints, or with different arguments.
        """
        options = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        path, state = checkpoint.load(self._self_driver, load_dir, tag, options)
        if path is not None:
            self._self_writer.has_loaded(load_dir, tag, universal=self.load_universal_checkpoint())
        return path, state

    def destroy(self) -> None:
        """Destroy the engine, as DeepSpeed does, and let its optimizers be anybody's: `zero_grad()` clears again."""
        self._self_driver.adapter.kept.end()
        self._self_writer.end()
        self.__wrapped__.destroy()

    # What would move the boundary behind its back.

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say that the next backward is its window's last, where the caller ends windows (`boundary: caller`).

        On ZeRO 0 and 1 gradients are then reduced in that backward, beside it where DeepSpeed can, and not in `step()`.
        Every rank says so before its last backward, or none does. It may be said again before `step()`.

        Raises:
            WindowError: the boundary follows from the counts, or a backward of the window has raised an error.
        """
        if isinstance(self._self_driver, CallersDriver):
            self._self_driver.announce(bool(is_boundary))
            return
        raise self._owned("set_gradient_accumulation_boundary", "remove the call; counts given to backward() decide")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raise WindowError: the target is fixed by the configuration."""
        raise self._owned("set_train_batch_size", "set gradient_accumulation_passes in the configuration")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise WindowError: the target is fixed by the configuration."""
        raise self._owned("set_train_micro_batch_size", "pass rollouts= to backward(); micro-batches may differ")

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce once for all backwards of a window, at the end of the block, where the caller ends windows.

        `with engine.coalesce_grad_reduction():` around the window's backwards, then `step()`. It saves reductions on
        ZeRO 2 and 3, at the memory of a whole gradient on every rank. DeepSpeed refuses it by `NotImplementedError` on
        ZeRO 0 and for BF16_Optimizer and FP16_Optimizer.

        Raises:
            WindowError: the boundary follows from the counts, or the window has been reduced and waits for its
                `step()`.
            ConfigError: the installed DeepSpeed has no such block.
        """
        if isinstance(self._self_driver, CallersDriver):
            return self._self_driver.coalescing()
        raise self._owned("coalesce_grad_reduction", "remove it; DeepSpeed's block must end at a boundary it can't see")

    def _owned(self, name: str, way_out: str) -> WindowError:
        return WindowError(f"{name}(): with gradient_accumulation_passes ds_parity owns the boundary; {way_out}")


for _name, _method in METHODS.items():
    setattr(ParityEngine, _name, _method)
