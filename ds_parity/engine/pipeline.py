"""A DeepSpeed PipelineModule: one call trains one window, whose micro-batches are all known.

DeepSpeed's `train_batch()` owns the micro-batches and the boundary (runtime/pipe/engine.py, 0.19.8), so a window is one
`train_batch()` of so many micro-batches. The columns of the pipeline, its data-parallel ranks, meet where gradients are
reduced, behind the last micro-batch of each: so each may have another number of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import wrapt

from ds_parity.config import Settings
from ds_parity.engine.arguments import counts_in, refuse_mean_of_parts, refuse_what_is_no_loss, weighting_of
from ds_parity.engine.division import silenced, silent
from ds_parity.engine.half_loaded import is_whole, refuse_half_loaded
from ds_parity.engine.internals.adapter import choose
from ds_parity.engine.internals.between_windows import BetweenWindows
from ds_parity.engine.internals.dropped_tokens import refuse_dropped_tokens
from ds_parity.engine.internals.group_options import Options
from ds_parity.engine.internals.moved_away import refuse_moved_away
from ds_parity.engine.internals.rates_behind_loads import Standing, follow_a_loop
from ds_parity.engine.internals.replaced import replaced
from ds_parity.engine.internals.schedule import failing_loudly, needed_by
from ds_parity.engine.internals.shown_groups import whole_groups
from ds_parity.engine.internals.stages import (
    averaged_over,
    buffers_of_every_type,
    checkpoint_activations,
    clip_over_stages,
    count_none,
    count_what_is_not_shared,
    lost_by_a_load,
    norms_over_stages,
    shared_weights,
)
from ds_parity.engine.internals.tied_sums import reduce_tied_gradients
from ds_parity.engine.pipeline_checkpoints import load, refuse_to_begin, save, with_states
from ds_parity.engine.pipeline_columns import PipelineColumn, refuse_parted, refuse_uneven
from ds_parity.engine.planned import PlansRead, Read, refuse_different_plans, refuse_plan_of_others
from ds_parity.engine.ranks.agreement import in_short, naming_lost_ranks
from ds_parity.engine.ranks.hostgroups import everybody
from ds_parity.engine.ranks.hostsum import HostSum
from ds_parity.engine.ranks.wire import ANYWHERE, LOADS, SAVED, SAVES, Place
from ds_parity.engine.record.skips import Skips
from ds_parity.engine.saving import Saving
from ds_parity.engine.writers import Writer
from ds_parity.errors import CheckpointError, ConfigError, RankDesyncError, WindowError
from ds_parity.planning.rollout import MicroBatch
from ds_parity.trace import StepRecord
from ds_parity.window import Counts

_LOG = logging.getLogger("ds_parity")
_HALVES = (torch.bfloat16, torch.float16)
_KEYS = {"inputs", "labels"}


class PipelinedEngine(wrapt.ObjectProxy[Any]):
    """DeepSpeed's PipelineEngine, which trains one window with each `train_window()`.

    Everything that is not listed here is DeepSpeed's own.

    Args:
        engine: DeepSpeed's.
        settings: the extra keys.
        number: of the engine among those of this process, the same on every rank (>= 1).
    """

    def __init__(self, engine: Any, settings: Settings, number: int = 1) -> None:
        super().__init__(engine)
        if engine.is_model_parallel:
            raise ConfigError(
                f"a pipeline whose stages are split over {engine.grid.model_parallel_size} tensor-parallel ranks: what "
                "they share is not counted once in the norm of the gradient; use stages of one rank each"
            )
        if needed := needed_by(engine.lr_scheduler):
            raise ConfigError(
                f"a pipeline with the scheduler {type(engine.lr_scheduler).__name__}, whose step() needs "
                f"{', '.join(needed)}: train_window() has nothing to give it, and DeepSpeed gives it the batch size; "
                "leave it out of initialize, and step it behind train_window() on every rank, with the same value"
            )
        count_what_is_not_shared(engine)
        clip_over_stages(engine)
        count_none(engine)
        self._self_options = Options(engine)
        self._self_adapter = choose(engine)
        self._self_adapter.prepare_pipeline()
        reduce_tied_gradients(engine, chain.from_iterable(self._self_adapter.groups()))
        checkpoint_activations(engine)
        self._self_lost = lost_by_a_load(engine)
        self._self_between = BetweenWindows(self._self_adapter)
        self._self_settings, self._self_number = settings, number
        self._self_columns: int = engine.dp_world_size
        self._self_weighting = weighting_of(settings, self._self_columns)
        self._self_over = HostSum(everybody(), settings.exchange_timeout)
        self._self_plans = PlansRead()
        self._self_writer = Writer()
        # Before a checkpoint ranks may have done other things for a while, and no window waits for them.
        self._self_patient = HostSum(everybody())
        self._self_last: StepRecord | None = None
        self._self_stand_in: MicroBatch | None = None
        self._self_empty = 0
        self._self_standing = Standing(engine.lr_scheduler)
        self._self_skips = Skips()
        self._self_half_loaded: str | None = None  # the folder of a load that has raised behind its beginning
        # Micro-batches of rollouts differ in length, and DeepSpeed would send them in buffers of the first one's shape.
        engine.dynamic_shape = True
        buffers_of_every_type(engine)

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last window, over all columns; None before the first one."""
        return self._self_last

    def train_window(self, micro_batches: Iterable[MicroBatch]) -> StepRecord:
        """Train one window: forward and backward of every micro-batch on every stage, and one optimizer step.

        The step is divided by the sum of the weights of all columns. All ranks of a column give the same micro-batches
        (those of its data-parallel rank); columns may give different numbers of them, also none. Only the first stage
        reads `inputs["inputs"]`, and only the last one `inputs["labels"]`; other ranks may leave these out.

        Args:
            micro_batches: with `inputs` (`inputs` and `labels`, a tensor or a tuple of tensors each) and counts.

        Returns:
            The record of the step, the same on every rank.

        Raises:
            WindowError: a micro-batch is wrong, or a column without one has never had any to stand in for it; gradients
                were changed outside of `train_window`, a parameter is trained that was frozen or not there when the
                engine was built, or all of this stage are frozen; or an earlier window has raised.
            RankDesyncError: ranks are not in the same window, ranks of a column gave different micro-batches, or
                another rank raised.
            ConfigError: the model has DeepSpeed's MoE layer, and another engine has brought an mpu since.
        """
        batches, gathered = self._exchanged(micro_batches)
        if batches and self._self_stand_in is None:
            self._self_stand_in = batches[0]
        columns = {one.number: one.counts for one in gathered}
        total = self._total(columns.values())
        step, samples = self._windows + 1, self.global_samples + sum(one.rollouts for one in _all(columns))
        follow_a_loop(self.__wrapped__)
        lr, loss, norm, applied = tuple(map(float, self.get_lr())), None, None, False
        if total:
            loss = self._trained(batches, columns[self._own_column], total, samples)
            self._self_standing.stepped(self.lr_scheduler)
            applied = bool(self.was_step_applied())
            self._self_skips.note(step - 1, applied=applied, scaled=False)
            norm = self.get_global_grad_norm() if applied else None
        else:
            self._self_empty += 1
            _LOG.warning("window %d has a total of 0: no optimizer step is taken for it", step - 1)
        self.__wrapped__.global_samples = samples
        self._self_last = self._counted(columns).model_copy(
            update={
                "step": step, "total": total, "loss": loss, "lr": lr, "skipped": not applied,
                "grad_norm": None if norm is None else float(norm),
            }
        )  # fmt: skip
        return self._self_last

    def train_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse DeepSpeed's own call, whose step is divided by a fixed number of micro-batches."""
        raise WindowError(
            "train_batch() of a pipeline with ds_parity: its step would be divided by gradient_accumulation_steps; "
            "call train_window(micro_batches), which divides by what the window contains"
        )

    def set_train_batch_size(self, train_batch_size: int) -> NoReturn:
        """Refuse it: `train_window` sets it for every window."""
        raise WindowError(
            f"set_train_batch_size({train_batch_size}): train_window(micro_batches) sets it for every window; give "
            "that call the micro-batches of the window"
        )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save between windows, as DeepSpeed does, with whose states they are under `client_state["ds_parity"]`.

        `latest` names the checkpoint once all ranks have written their files.

        Raises:
            CheckpointError: another engine of this process has saved its checkpoint under the tag in that folder; or
                `client_state` is no mapping, or has a value of the caller's own under `ds_parity`, or under a name of
                DeepSpeed's (one that was loaded may be given: these are brought up to date); or a rank could not write
                its files; or a load has ended half way.
            WindowError: a window has raised in this engine.
            RankDesyncError: another rank ended before it had saved, does something else, or saves under another tag:
                all ranks save.
        """
        try:
            self._self_between.refuse_failed("save_checkpoint()")
            refuse_half_loaded(self._self_half_loaded, "save_checkpoint()")
            state = with_states(self.__wrapped__, client_state)
            if self._self_lost:
                raise CheckpointError(
                    f"save_checkpoint(): this stage trains {', '.join(sorted(self._self_lost))} of a tied layer, which "
                    "it uses by a forward_fn alone: DeepSpeed saves no file of it, and a run that goes on would lose "
                    "it; put what stages do not share into a layer of its own, or name it in tied_weight_attr, and use "
                    "the layer without a forward_fn on the first of its stages"
                )
        except Exception as error:  # whatever it is, the others come to save
            self._tell(SAVES, error)
            raise
        options = {"names_latest": save_latest, "without_frozen": exclude_frozen_parameters}
        saving = Saving.of(self.__wrapped__, self._self_writer, save_dir, tag, **options)
        places = (self._place(kind, self._windows) for kind in (SAVES, SAVED))
        before, behind = (partial(self._self_patient.gather, place=one) for one in places)
        with naming_lost_ranks("save_checkpoint()"):
            saved = save(self.__wrapped__, saving, state, before, behind)
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
        """Load, as DeepSpeed does, and compare whose states were loaded.

        Raises:
            WindowError: a window has raised in this engine.
            CheckpointError: DeepSpeed refused the checkpoint, or its states are those of another optimizer, or of other
                parameters.
            RankDesyncError: another rank ended before it had loaded, does something else, or loads another checkpoint:
                all ranks load.
        """
        options = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }
        try:
            self._self_between.refuse_failed("load_checkpoint()")
        except WindowError as failed:
            self._tell(LOADS, failed)
            raise
        # A rank may load wherever it is, as the way out of an error.
        before = partial(self._self_patient.gather, place=self._place(LOADS, ANYWHERE))
        behind = partial(self._self_over.gather, place=self._place("has loaded", ANYWHERE))
        with naming_lost_ranks("load_checkpoint()"):
            there, half_loaded = (
                refuse_to_begin(self.__wrapped__, load_dir, tag, options, before),
                self._self_half_loaded,
            )
            self._self_half_loaded = str(load_dir) if there else half_loaded
            path, client_state = load(self.__wrapped__, load_dir, tag, options, behind, self._self_standing)
        whole = path is not None and is_whole(self.__wrapped__, options)
        self._self_half_loaded = None if whole else half_loaded
        if path is not None:
            if not options["load_module_only"]:
                self._self_standing.loaded(self.lr_scheduler)
            self._self_writer.has_loaded(load_dir, tag, universal=self.load_universal_checkpoint())
        return path, client_state

    def destroy(self) -> Any:
        """Destroy the engine, as DeepSpeed does; its optimizer may be stepped by others then."""
        self._self_between.end()
        self._self_writer.end()
        return self.__wrapped__.destroy()

    # The exchange.

    @property
    def _windows(self) -> int:
        """How many there were; a window that took no step is none of DeepSpeed's steps."""
        return int(self.global_steps) + self._self_empty

    @property
    def _own_column(self) -> int:
        return int(self.grid.get_data_parallel_id())

    def _place(self, kind: str, window: int) -> Place:
        return Place(kind, window, 0, self._self_settings.fingerprint, self._self_number)

    def _tell(self, kind: str, error: Exception) -> None:
        """Come to what the other ranks wait in, to say that this one has raised."""
        with suppress(RankDesyncError, RuntimeError):
            self._self_over.gather(None, replace(self._place(kind, self._windows), error=in_short(error)))

    def _exchanged(self, micro_batches: Iterable[MicroBatch]) -> tuple[list[MicroBatch], list[PipelineColumn]]:
        """Return this rank's micro-batches, and what every rank said of its own."""
        over, kind = self._self_over, "trains a window"
        try:
            self._self_between.refuse(self._windows)
            refuse_half_loaded(self._self_half_loaded, "train_window()")
            refuse_moved_away(self.__wrapped__, self._windows, steps=True)
            refuse_dropped_tokens(self.__wrapped__)
            batches = _listed(micro_batches)
            counts = tuple(counts_in(one, self._self_weighting) for one in batches)
            for batch, own in zip(batches, counts, strict=True):
                refuse_mean_of_parts(self._self_weighting, own, len(getattr(batch, "held", ())))
            self._refuse_inputs(batches)
        except Exception as error:
            self._tell(kind, error)
            raise
        runs, stage = bool(batches) or self._self_stand_in is not None, int(self.grid.get_stage_id())
        read = self._self_plans.copy()
        for batch in batches:
            read.read(Read(batch), self._self_columns)
        plans = read.tell()
        rates = self._self_options.told()
        ties = shared_weights(self.module, chain.from_iterable(self._self_adapter.groups()))
        norms, frozen = norms_over_stages(self.__wrapped__), self._self_adapter.frozen_parameters()
        apart = self._self_adapter.experts_apart
        said = PipelineColumn(self._own_column, counts, runs, stage, rates, plans, ties, norms, frozen, apart)
        with naming_lost_ranks("train_window()"):
            gathered: list[PipelineColumn] = over.gather(said, self._place(kind, self._windows))
            if any(one.plans != plans for one in gathered):
                place = self._place("compares plans", self._windows)
                refuse_different_plans(lambda own: over.gather(own, place), read)
        self._self_plans = read
        refuse_parted(gathered)
        if any(one.experts_apart for one in gathered):
            refuse_uneven(gathered, self._self_weighting.silences)
        if not all(one.runs for one in gathered):
            raise WindowError(
                "a column of the pipeline has no micro-batch in its first window, so nothing can run there, and the "
                "others wait for it where gradients are reduced; give each column one in the first window, if need be "
                "one with rollouts=0 and tokens=0"
            )
        return batches, gathered

    def _refuse_inputs(self, batches: Sequence[Any]) -> None:
        labelled = self.is_last_stage() and self.module.loss_fn is not None
        needed = ({"inputs"} if self.is_first_stage() else set()) | ({"labels"} if labelled else set())
        for number, batch in enumerate(batches):
            what = f"micro-batch {number} of train_window()"
            refuse_plan_of_others(batch, self._self_columns, lambda: self._own_column, what)
            inputs = batch.inputs
            if not isinstance(inputs, Mapping) or not needed <= inputs.keys() or inputs.keys() - _KEYS:
                keys = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
                raise WindowError(
                    f"micro-batch {number} of train_window() has inputs {keys}: a pipeline takes 'inputs' at its first "
                    "stage and 'labels' at its last; give MicroBatch({'inputs': ..., 'labels': ...}, rollouts=...)"
                )
            self._refuse_values(number, {key: inputs[key] for key in needed})

    def _refuse_values(self, number: int, values: Mapping[str, Any]) -> None:
        # One stage that raised inside DeepSpeed's train_batch() would leave the others waiting there.
        for key, value in values.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if not all(isinstance(one, torch.Tensor) for one in parts):
                raise WindowError(
                    f"micro-batch {number} of train_window() has {key} of {type(value).__name__}: a pipeline takes a "
                    "tensor, or a tuple of tensors"
                )

    def _counted(self, columns: Mapping[int, Sequence[Counts]]) -> StepRecord:
        """Return a record with what the columns contain."""
        counts = _all(columns)
        active = [sum(not self._self_weighting.silences(one) for one in column) for column in columns.values()]
        return StepRecord(
            step=1,
            passes=max(active),
            idle_passes=sum(max(active) - one for one in active),
            rollouts=sum(one.rollouts for one in counts),
            prompts=sum(one.prompts for one in counts),
            tokens=sum(one.tokens for one in counts),
            total=None,
            loss=None,
            lr=None,
            grad_norm=None,
        )

    def _total(self, columns: Iterable[Sequence[Counts]]) -> float:
        weighting = self._self_weighting
        total = math.fsum(weighting.of(one) for column in columns for one in column)
        return weighting.constant if total and weighting.constant is not None else total

    # The window.

    def _trained(self, batches: list[MicroBatch], counts: Sequence[Counts], total: float, samples: int) -> float:
        """Run DeepSpeed's train_batch on the micro-batches that weigh something, or silence this column."""
        weighting, engine = self._self_weighting, self.__wrapped__
        weighs = [not weighting.silences(one) for one in counts]
        runs = [batch for batch, one in zip(batches, weighs, strict=True) if one]
        # DeepSpeed divides by the column's own number of micro-batches, and averages over columns.
        averaged = averaged_over(engine, self._self_columns)
        shares: list[float | None] = [
            weighting.divisor(total, own, averaged) / len(runs) for own, one in zip(counts, weighs, strict=True) if one
        ]
        idle = not runs
        if idle:
            if batches:
                self._self_stand_in = batches[0]  # what weighs nothing runs its own inputs
            assert self._self_stand_in is not None, "ranks have agreed that there is one"
            runs, shares = [self._self_stand_in], [None]
        before = engine.train_batch_size()
        engine.set_train_batch_size(len(runs) * engine.train_micro_batch_size_per_gpu() * self._self_columns)
        # DeepSpeed adds its batch size in the step, and its monitors write there.
        engine.global_samples = samples - engine.train_batch_size()
        data = iter([(batch.inputs.get("inputs"), batch.inputs.get("labels")) for batch in runs])
        try:
            silence = silenced(engine.module) if idle else nullcontext()
            with (
                self._self_between.training(),
                self._weighed(shares),
                failing_loudly(engine),
                whole_groups(engine),
                silence,
            ):
                # DeepSpeed averages losses over columns also where it adds their gradients up.
                return float(engine.train_batch(data)) * (self._self_columns // averaged)
        finally:
            engine.set_train_batch_size(before)

    @contextmanager
    def _weighed(self, shares: Iterable[float | None]) -> Iterator[None]:
        """Divide the losses of the micro-batches, in their order, by these; None silences."""
        module, left = self.module, iter(shares)
        given = module.loss_fn

        def loss_fn(outputs: Any, labels: Any) -> Any:
            loss = outputs if given is None else given(outputs, labels)
            refuse_what_is_no_loss(loss)
            share = next(left)
            loss = loss.float() if loss.dtype in _HALVES else loss
            if share is not None:
                return loss / share
            return silent(loss)

        # It may stand in front of a module (torch.nn.CrossEntropyLoss).
        with replaced(module, "loss_fn", loss_fn):
            yield


def _listed(micro_batches: Any) -> list[Any]:
    try:
        there = iter(micro_batches)
    except TypeError as error:
        raise WindowError(
            f"train_window() got a {type(micro_batches).__name__}, which can't be iterated ({error}): it takes the "
            "micro-batches of one window; give a list of ds_parity.MicroBatch, which may be empty"
        ) from error
    return list(there)


def _all(columns: Mapping[int, Sequence[Counts]]) -> list[Counts]:
    return [one for column in columns.values() for one in column]
