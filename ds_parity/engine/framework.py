"""An engine whose caller has a boundary of its own: Hugging Face accelerate, and what trains through it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from ds_parity.config import Settings
from ds_parity.engine.division import Loss
from ds_parity.engine.driver import CallersBoundary, Driver
from ds_parity.engine.engine import ParityEngine
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.preconditions import refuse_no_loss
from ds_parity.errors import ConfigError, WindowError
from ds_parity.trace.records import DIVIDED_BY_TRAINER
from ds_parity.window import PassTotals, Weighting

_LOG = logging.getLogger("ds_parity")
# Ranks that say different things end in a RankDesyncError, which shows these.
_DOING = {True: "ends the window with its pass", False: "goes on after its pass"}
_UNHEARD = (
    "install(normalise=...): the trainer's loss can be divided by what its step contains only where the trainer has "
    "divided it itself (scale_wrt_gas=False) and ends windows itself, and ds_parity.boundary is 'rollouts'; leave "
    "normalise out, set ds_parity.boundary to 'rollouts', or take a release of transformers and accelerate that does so"
)


@dataclass(frozen=True, slots=True)
class Divided:
    """What a trainer has divided the loss of a micro-batch by.

    Attributes:
        unit: what the step is to be a mean over, `rollout` or `token`.
        by: the loss times this is its sum over the micro-batch's units (> 0).
        rollouts: the micro-batch's own (>= 0), None where it has the usual number.
        tokens: its loss tokens (>= 0).
    """

    unit: str
    by: float
    rollouts: int | None
    tokens: int


@dataclass
class _Short:
    """Which window its caller ended short last, in the run that is under way."""

    window: int | None = None

    def forget(self, _: int) -> None:
        """Forget it: a checkpoint was loaded, and the windows behind it are run again."""
        self.window = None


class FrameworkEngine(ParityEngine):
    """What `deepspeed.initialize` returns under `install()`: a `ParityEngine` that a framework may drive its own way.

    The framework says before every backward, by `set_gradient_accumulation_boundary`, whether a window ends there, and
    calls `step()` at that end alone (accelerate 1.15, DeepSpeedEngineWrapper.backward). What it says is
    checked against the counts in every pass. A caller that never says so finds a `ParityEngine`.
    """

    def __init__(self, engine: Engine, settings: Settings, sequence: int = 1, number: int = 1) -> None:
        super().__init__(engine, settings, sequence, number)
        self._self_said: bool | None = None
        self._self_divided: bool | None = None
        self._self_ended = False
        self._self_short = _Short()
        self._self_driver.on_resume.append(self._self_short.forget)
        self._self_undivided: Divided | None = None
        # Whether it is settled who accumulates where step() alone ends windows.
        self._self_accumulates = not settings.by_caller

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other ranks what is raised inside, before a `backward`: it may be this rank's alone."""
        telling: AbstractContextManager[None] = self._self_driver.telling()
        return telling

    def undivide(self, divided: Divided) -> None:
        """Take the next loss times what it was divided by, and divide by the step's total instead.

        Args:
            divided: what the loss of the next `backward(scale_wrt_gas=False)` was divided by.
        """
        self._self_undivided = divided

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take the caller's word on whether the next passes end their window: it is checked in `backward`.

        Raises:
            WindowError: it is called inside `passes`, where the counts are known and decide.
            ConfigError: windows of this configuration can't end where a framework's do, or `lr_progress` is `rollout`
                and the caller steps a scheduler that DeepSpeed does not have.
        """
        self._refuse_inside_passes()
        if self._self_settings.by_caller:
            self._self_accumulates = True
            super().set_gradient_accumulation_boundary(is_boundary)
            return
        if self._self_said is None:
            self._refuse_uneven_windows()
            self._refuse_scheduler_out_of_reach()
        self._self_said = bool(is_boundary)

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
        """Run backward and count, as `ParityEngine.backward` does; a pass inside a window needs no `step()`.

        Args:
            loss: scalar; where `scale_wrt_gas` is False, a share of the step's loss, which is then the sum of the
                shares of all passes, averaged over ranks.
            retain_graph: as in DeepSpeed.
            scale_wrt_gas: False: the caller has divided the loss already (transformers' Trainer and TRL).
            rollouts: as in `ParityEngine.backward`.
            prompts: likewise.
            tokens: likewise.
            weight: likewise.

        Raises:
            WindowError: what the caller said of the boundary contradicts the counts; a loss that is divided already is
                to be weighed by `loss_weight`; or as in `ParityEngine.backward`.
            RankDesyncError: ranks say different things of the boundary, or are not in the same pass.
        """
        driver: Driver = self._self_driver
        said: bool | None = self._self_said
        self._self_ended = False
        if (rollouts, prompts, tokens, weight) != (None,) * 4:
            self._self_accumulates = True  # no framework
        # Where step() alone ends windows, there is no boundary to check: losses are divided, or not, as everywhere.
        by_caller: bool = self._self_settings.by_caller
        divided: Divided | None = self._self_undivided
        self._self_undivided = None
        if divided is not None and (scale_wrt_gas or by_caller or said is None):
            raise WindowError(_UNHEARD)
        if by_caller or said is None or driver.queue is not None:
            self._settle_division(divided=by_caller and not scale_wrt_gas)
            scaling = scale_wrt_gas or by_caller
            return super().backward(
                loss, retain_graph, scaling, rollouts=rollouts, prompts=prompts, tokens=tokens, weight=weight
            )
        refuse_no_loss(driver, loss)
        driver.refuse_owed_step()
        self._settle_division(divided=not scale_wrt_gas, by=divided)
        if divided is not None:
            assert isinstance(loss, torch.Tensor), "a trainer's loss is one number"
            # What the trainer's own division makes of the step, for `ds-parity compare`.
            driver.meter.record(DIVIDED_BY_TRAINER, loss.detach())
            loss = loss.float() * divided.by
            rollouts, tokens = divided.rollouts, divided.tokens
        terms = loss.keys() if isinstance(loss, Mapping) else None
        counts = driver.counts_given(rollouts, prompts, tokens, weight, terms)
        caller = CallersBoundary(said, _DOING[said], functools.partial(self._check_boundary, said))
        with driver.waiting("backward()"):
            scaled: torch.Tensor = driver.run_pass(loss, counts, caller, retain_graph=retain_graph)
        if not said:
            driver.end_pass()
        # A pass inside a window ends with its backward, so a step() that the framework calls after it does nothing.
        self._self_ended = not said
        return scaled

    def step(self, lr_kwargs: Any = None) -> None:
        """End the window that the last `backward` closed; of no effect after one inside a window, which has ended.

        Raises:
            WindowError: under `boundary` `caller` the first `step()` comes behind one pass where the configuration
                accumulates several, from a framework that says nothing of where windows end, nor of what they contain.
        """
        if self._self_ended:
            self._self_ended = False
            return
        if not self._self_accumulates and self._self_driver.queue is None:
            with self._self_driver.telling():
                self._refuse_step_of_every_pass()
        super().step(lr_kwargs)
        self._self_accumulates = True

    def _refuse_step_of_every_pass(self) -> None:
        whole = self.gradient_accumulation_steps()
        if self._self_driver.ledger.window.passes == 1 < whole:
            raise WindowError(
                f"the first step() behind 1 of {whole} passes: with ds_parity.boundary 'caller' each step() ends a "
                f"window, and gradient_accumulation_passes = {self._self_settings.passes} asks for {whole} passes a "
                "rank in each. A framework that calls step() after every pass, because DeepSpeed accumulates "
                "(Lightning), needs ds_parity.boundary left out; a loop whose windows have any length gives "
                "backward(loss, rollouts=...), or announces the last one (set_gradient_accumulation_boundary(True))"
            )

    def expect(self, **counts: Any) -> None:
        """Say what this rank's next window will contain, as `ParityEngine.expect` does."""
        self._self_accumulates = True  # no framework
        super().expect(**counts)

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce once for all backwards of a window, as `ParityEngine.coalesce_grad_reduction` does."""
        self._self_accumulates = True  # likewise
        return super().coalesce_grad_reduction()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current pass ends its window: what the framework has said last, as in DeepSpeed.

        Raises:
            WindowError: as `ParityEngine.is_gradient_accumulation_boundary`, where no framework has said so.
        """
        said: bool | None = self._self_said
        inside_passes = self._self_driver.queue is not None
        return super().is_gradient_accumulation_boundary() if said is None or inside_passes else said

    def _check_boundary(self, said: bool, totals: PassTotals) -> None:
        driver: Driver = self._self_driver
        window, closes = driver.ledger.window, driver.ledger.closes_with(totals)
        if said == closes:
            return
        # What ends a window of fewer passes than it was configured with, or of as many with fewer rollouts in the last
        # one, after a whole window, is the end of its data.
        whole_before = window.index > 0 and window.index - 1 != self._self_short.window
        if said and whole_before and window.passes < self.gradient_accumulation_steps():
            self._end_short(totals)
            return
        raise WindowError(
            f"set_gradient_accumulation_boundary({said}) before pass {window.passes} of window {window.index}: the "
            f"caller {'ends the window here' if said else 'goes on'}, but after this pass it holds "
            f"{self._units_so_far(totals)}, so that it {'goes on' if said else 'ends here'}. A backward() counts "
            f"{driver.usual_rollouts} rollouts on each of {driver.ranks} ranks (train_micro_batch_size_per_gpu) unless "
            f"it is given counts. Let the framework accumulate {self.gradient_accumulation_steps()} passes "
            "(gradient_accumulation_steps), over data that holds whole windows (an epoch's end may cut one short "
            "behind a whole one); or, where the counts vary, call engine.backward(loss, rollouts=...) and "
            "engine.step() yourself and not the framework's backward"
        )

    def _end_short(self, totals: PassTotals) -> None:
        driver: Driver = self._self_driver
        window, rule = driver.ledger.window, driver.settings.last_window
        what = (
            f"window {window.index} is ended by its caller after {window.passes + 1} of "
            f"{self.gradient_accumulation_steps()} passes a rank, at {self._units_so_far(totals)}: its data has ended"
        )
        if rule != "step":
            raise WindowError(
                f"{what}, and the caller takes a step there, but ds_parity.last_window is {rule!r}; choose 'step', or "
                f"give it data of a multiple of {self.gradient_accumulation_steps()} micro-batches a rank"
            )
        _LOG.warning("%s; the step is normalised by what it holds (ds_parity.last_window: step)", what)
        self._self_short.window = window.index

    def _units_so_far(self, totals: PassTotals) -> str:
        driver: Driver = self._self_driver
        window, unit = driver.ledger.window, driver.settings.count
        units = driver.ledger.units() + totals.counted(unit)
        return f"{units} of the {window.closes_at - window.opened_at} {unit}s that close it"

    def _settle_division(self, *, divided: bool, by: Divided | None = None) -> None:
        if self._self_settings.loss_weight == "divided":  # said once and for all
            if by is not None:
                raise WindowError(
                    f"install(normalise={by.unit!r}) beside ds_parity.loss_weight 'divided': the first undoes the "
                    "trainer's division, and the second says that it stands, so that nothing would divide; remove "
                    "ds_parity.loss_weight and across_ranks, or leave normalise out"
                )
            return
        if self._self_divided is None:
            self._self_divided = divided
            if divided:
                self._refuse_weights()
                driver: Driver = self._self_driver
                driver.ledger.weigh_by(Weighting(by.unit, "sum") if by else Weighting.divided(driver.ranks))
        elif divided != self._self_divided:
            raise WindowError(
                f"backward(scale_wrt_gas={not divided}) after backward(scale_wrt_gas={divided}): either every loss has "
                "been divided by its caller, or none has; pass the same in every backward"
            )

    def _refuse_weights(self) -> None:
        settings: Settings = self._self_settings
        for name in ("loss_weight", "loss_reduction", "terms"):
            if name in settings.model_fields_set:
                raise WindowError(
                    f"backward(scale_wrt_gas=False): the caller has divided the loss for the step itself, and "
                    f"ds_parity.{name} = {getattr(settings, name)!r} would weigh it again; remove ds_parity.{name} (or "
                    'write loss_weight "divided" with across_ranks "mean", which says the same): '
                    "the caller's own division stands (transformers' Trainer weighs all tokens of the step alike, TRL "
                    "by its loss_type), and ds_parity keeps the count"
                )

    def _refuse_inside_passes(self) -> None:
        if self._self_driver.queue is not None:
            raise WindowError(
                "set_gradient_accumulation_boundary() inside passes(), which knows the window's last pass; inside "
                "passes() call engine.backward(loss) and engine.step(), not the framework's backward"
            )

    def _refuse_uneven_windows(self) -> None:
        settings: Settings = self._self_settings
        passes, ranks = settings.passes, self._self_driver.ranks
        if passes % ranks and settings.overshoot == "carry":
            raise ConfigError(
                f"gradient_accumulation_passes = {passes} on {ranks} data-parallel ranks: a framework runs "
                f"{self.gradient_accumulation_steps()} passes a rank in every window, and under ds_parity.overshoot "
                f"'carry' some windows take fewer; write a multiple of {ranks}, or choose 'reset'"
            )

    def _refuse_scheduler_out_of_reach(self) -> None:
        if self._self_settings.lr_progress == "rollout" and self._self_driver.boundary.schedule() is None:
            raise ConfigError(
                "ds_parity.lr_progress is 'rollout', but DeepSpeed was given no scheduler: the framework steps its "
                "own, once a step, and it can't be placed from here; write a `scheduler` section (a Trainer hands its "
                "own scheduler over where there is an `optimizer` section), or choose 'optimizer_step'"
            )
