"""Putting a scheduler at a position (`lr_progress: rollout`), and what its `step()` is given elsewhere."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import wrapt
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import ConfigError, WindowError
from ds_parity.window import Progress

_LOG = logging.getLogger("ds_parity")

# DeepSpeed's schedulers are functions of `last_batch_iteration`, which stands one behind the steps taken
# (lr_schedules.py, 0.19.8: -1 before the first).
BY_ITERATION = tuple(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES)

# Megatron's schedulers count samples, and DeepSpeed gives them its batch size: `step(increment)`.
_SAMPLES: Final = "increment"


def refuse_unfit(scheduler: Any, given: Any, doing: str) -> None:
    """Raise WindowError where a scheduler's `step()` can't be called with what a loop has given for it.

    DeepSpeed would call it with its batch size then, whatever the argument means there (engine.py, `_take_model_step`,
    0.19.8), so that ReduceLROnPlateau takes the batch size for the metric, and StepLR for the epoch.

    Args:
        scheduler: the engine's; None for none.
        given: `lr_kwargs` of the loop.
        doing: what the loop has called, for the message ("step() in window 3").
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise WindowError(
            f"{doing} was given lr_kwargs={given!r}: must be a mapping of names to values for the scheduler's step(); "
            "give lr_kwargs={'metrics': ...}, or leave it out"
        )
    # What stands at a position takes anything, and has no use for it.
    scheduler, given = behind_proxy(scheduler), dict(given or {})
    if scheduler is None or _fits(scheduler, (), given):
        return
    name = type(scheduler).__name__
    if given:
        takes = ", ".join(inspect.signature(scheduler.step).parameters) or "nothing"
        raise WindowError(
            f"{doing} was given lr_kwargs with {', '.join(sorted(given))}, but {name}.step() takes {takes}: DeepSpeed "
            "would give it the batch size in their place; leave lr_kwargs out, or give what the scheduler takes"
        )
    if not (wanted := needed_by(scheduler)):
        return
    raise WindowError(
        f"{doing} was given no lr_kwargs, but {name}.step() needs {', '.join(wanted)}: DeepSpeed would give it the "
        f"batch size in its place; give step(lr_kwargs={{{wanted[0]!r}: ...}}) the same value on every rank, where the "
        "data end inside a window finish(lr_kwargs=...) too, behind passes(..., finish=False) (with terms of several "
        "units, which take whole windows there, choose ds_parity.last_window 'drop'); where a framework calls "
        "step(), as the Trainer does with lr_scheduler_type='reduce_lr_on_plateau', choose one that counts steps"
    )


def behind_proxy(scheduler: Any) -> Any:
    """Return the scheduler that a `RolloutSchedule` stands for; any other, or None, as it is."""
    return scheduler.__wrapped__ if isinstance(scheduler, RolloutSchedule) else scheduler


def _fits(scheduler: Any, args: Any, given: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(scheduler.step).bind(*args, **given)
    except TypeError:
        return False
    except ValueError:  # it has none that can be read
        return True
    return True


def needed_by(scheduler: Any) -> list[str]:
    """Return the names of what a scheduler's `step()` must be given by a loop.

    Args:
        scheduler: the engine's; None for none.
    """
    if scheduler is None or _fits(scheduler, (), {}):
        return []
    parameters = inspect.signature(scheduler.step).parameters.values()
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in any_number]
    return [] if needed == [_SAMPLES] else needed


class _Loud(wrapt.ObjectProxy[Any]):
    """A scheduler whose own TypeError is seen: DeepSpeed takes every one for an argument that is missing."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step it.

        Raises:
            WindowError: it has raised a TypeError, though it takes these arguments.
        """
        scheduler = self.__wrapped__
        try:
            return scheduler.step(*args, **kwargs)
        except TypeError as error:
            # One that hands on what it is given may hand it to Megatron's.
            if not _fits(scheduler, args, kwargs) or f"argument: {_SAMPLES!r}" in str(error):
                raise
            raise WindowError(
                f"step() of the scheduler {type(behind_proxy(scheduler)).__name__} has raised TypeError: {error}. "
                "DeepSpeed would step it once more, with the batch size as its argument. The weights have been "
                "stepped, and the learning rates have not: mend the scheduler, or give it what it needs with "
                "step(lr_kwargs=...), and load a checkpoint into a new engine"
            ) from error


@contextmanager
def failing_loudly(engine: Engine) -> Iterator[None]:
    """Let a TypeError that the scheduler raises inside DeepSpeed's step be seen.

    Raises:
        WindowError: it has raised one.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        yield
        return
    engine.lr_scheduler = _Loud(scheduler)
    try:
        yield
    finally:
        engine.lr_scheduler = scheduler


class RolloutSchedule(wrapt.ObjectProxy[Any]):
    """A scheduler whose `step()` goes to the nominal progress in place of one step on; all else is the scheduler's.

    A function of its step (all of DeepSpeed's, LambdaLR) stands at the fractional position; any other takes the whole
    steps that were completed, and the remainder is carried. Between two steps, the LR of DeepSpeed's schedulers lies
    between theirs.

    Raises:
        ConfigError: the scheduler moves by a metric, not by steps.
    """

    def __init__(self, scheduler: Any, on_load: Callable[[], None] | None = None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ds_parity.lr_progress is 'rollout' but the scheduler is ReduceLROnPlateau, which moves by a metric "
                "and has no position to stand at; choose 'optimizer_step', or a scheduler that counts steps"
            )
        if not _fits(scheduler, (), {}):
            raise ConfigError(
                f"ds_parity.lr_progress is 'rollout' but the scheduler is {type(scheduler).__name__}, whose step() "
                f"needs {', '.join(needed_by(scheduler)) or _SAMPLES} and has no position to stand at; choose "
                "'optimizer_step', or a scheduler that counts steps"
            )
        super().__init__(scheduler)
        self._self_progress: Progress | None = None
        self._self_taken = 0
        self._self_on_load = on_load

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the scheduler's own state, as a loop does that keeps the scheduler itself."""
        returned = self.__wrapped__.load_state_dict(*args, **kwargs)
        if self._self_on_load is not None:
            self._self_on_load()
        return returned

    def progress(self, known: Sequence[Progress]) -> Progress | None:
        """Return the progress at which the scheduler stands; None where that can't be told of one that counts steps.

        Args:
            known: what it may be, the likelier first; one at least. They tell what a position alone does not, where the
                scheduler stands at whole steps.
        """
        scheduler, target = self.__wrapped__, known[0].target
        by_iteration, by_lambda = isinstance(scheduler, BY_ITERATION), isinstance(scheduler, LambdaLR)
        if (at := stands_at(scheduler)) is None:
            return None
        for one in known:
            whole_beside = by_iteration and float(at).is_integer() and abs(one.nominal - at) < 1
            if one.units == round(at * target) or whole_beside or (not by_lambda and one.whole == at):
                return one
        return Progress(target, max(0, round(at * target))) if by_iteration or by_lambda else None

    def advance_to(self, progress: Progress | None) -> None:
        """Say where the next `step()` goes; None: nowhere, because it is the loop's own."""
        self._self_progress = progress

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go to the position last given to `advance_to`; what is passed here is the caller's step count, and unused.

        A loop that steps the engine's scheduler itself finds it there already, or at its start.
        """
        if self._self_progress is not None:
            self._place(self._self_progress)

    def goes_on_from_its_own_step(self) -> None:
        """Take the steps that it stands at as taken: it was put in another's place in the middle of a run."""
        self._self_taken = max(0, int(stands_at(self.__wrapped__) or 0))

    def resume_at(self, progress: Progress) -> None:
        """Take `progress` as reached already: the scheduler's own state came from a checkpoint."""
        self._self_taken = progress.whole
        if self._self_progress is not None:
            self._self_progress = progress

    def _place(self, progress: Progress) -> None:
        scheduler = self.__wrapped__
        # A whole position stays an int, as DeepSpeed itself passes it.
        nominal: float = progress.whole if progress.nominal.is_integer() else progress.nominal
        if isinstance(scheduler, BY_ITERATION):
            scheduler.step(_within(scheduler, nominal - 1))
        elif isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = nominal - 1  # type: ignore[assignment]  # fractional, on purpose
            scheduler.step()
        else:
            # Any other scheduler only knows steps, so it takes those that became whole since the last.
            for _ in range(progress.whole - self._self_taken):
                scheduler.step()
        self._self_taken = progress.whole


def stands_at(scheduler: Any) -> float | None:
    """Return the steps that a scheduler, which is no proxy, has taken (>= 0), a fraction too; None if it keeps none."""
    if isinstance(scheduler, BY_ITERATION):
        return float(scheduler.last_batch_iteration + 1)
    at = getattr(scheduler, "last_epoch", None)
    return at if isinstance(at, int | float) else None


def _within(scheduler: Any, iteration: float) -> float:
    """Return the iteration itself, or a whole one beside it where the LR would leave the range of the two beside it.

    DeepSpeed's formulas are written for whole steps. Its warm-up by the logarithm is at the maximum a step before the
    warm-up ends (`_get_gamma`: log(N) / log(N) at N - 1) and would go on rising; OneCycle would begin a second cycle
    between the last step of its cycle and the first of its decay.
    """
    below = math.floor(iteration)
    if iteration == below or iteration < 0:  # before the first step there is the LR at the start alone
        return iteration
    here, first, last = (_rates_at(scheduler, at) for at in (iteration, below, below + 1))
    if all(min(ends) <= rate <= max(ends) for rate, *ends in zip(here, first, last, strict=True)):
        return iteration
    # That one whose LR is nearer, so that a warm-up never falls back; the one that was reached where both are as near.
    return below if _apart(here, first) <= _apart(here, last) else below + 1


def _rates_at(scheduler: Any, iteration: float) -> list[float]:
    scheduler.step(iteration)
    rates: list[float] = scheduler.get_lr()
    return rates


def _apart(rates: list[float], others: list[float]) -> float:
    return sum(abs(one - other) for one, other in zip(rates, others, strict=True))
