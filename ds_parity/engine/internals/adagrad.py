"""Lets ZeRO 1 to 3 step the Adagrad that they were given, in place of one of DeepSpeed's own making."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.config.versions import MEASURED
from ds_parity.engine.internals.replaced import wrapped
from ds_parity.engine.internals.surface import Engine
from ds_parity.engine.internals.unread import is_unsure
from ds_parity.errors import ConfigError

_HERE: Final = "adagrad.py"
_INITIALIZE: Final = "initialize_optimizer_states"


@contextmanager
def own_adagrad() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an engine over an optimizer that is torch's Adagrad.

    Adagrad makes its states when it is built. So that there are some for its flat partitions, DeepSpeed builds another
    one, of the first one's defaults (stage_1_and_2.py and stage3.py, initialize_optimizer_states): without its groups
    and what they say, its class, and the schedulers that were built over it
    (tools/deepspeed_faults/adagrad_built_anew.py). Only the states are taken from it here. A release that does this in
    another way, which nobody has read, is left as it is: `refuse_another` sees what it has done.
    """
    if is_unsure(_HERE):
        yield
        return
    with (
        wrapped(DeepSpeedZeroOptimizer, _INITIALIZE, _then_its_own),
        wrapped(DeepSpeedZeroOptimizer_Stage3, _INITIALIZE, _then_its_own),
    ):
        yield


def refuse_another(engine: Engine) -> None:
    """Raise where a release that nobody has read steps another Adagrad than the one that was given.

    Args:
        engine: that DeepSpeed has just built.

    Raises:
        ConfigError: it does.
    """
    if not engine.zero_optimization_stage():
        return
    given = engine.basic_optimizer
    stepped = getattr(engine.optimizer, "optimizer", given)
    if isinstance(given, torch.optim.Adagrad) and stepped is not given:
        raise ConfigError(
            f"the optimizer is torch's Adagrad: on stage {engine.zero_optimization_stage()} the installed DeepSpeed "
            f"builds another one in its place, so that groups and schedulers have no effect, and ds_parity could not "
            f"keep it from that; use stage 0, or install deepspeed=={MEASURED[-1]}"
        )


def _then_its_own(initialize: Callable[[Any], None]) -> Callable[[Any], None]:
    def initialized(self: Any) -> None:
        own = self.optimizer
        if isinstance(own, torch.optim.Adagrad):
            refuse_more(own)
        initialize(self)
        if self.optimizer is not own:
            own.state, self.optimizer = self.optimizer.state, own

    return initialized


def refuse_more(own: torch.optim.Adagrad) -> None:
    """Raise where a class of one's own has more than Adagrad has, for which DeepSpeed builds no states.

    Args:
        own: the optimizer that was given.

    Raises:
        ConfigError: it has states, or defaults, that Adagrad has not.
    """
    known = inspect.signature(torch.optim.Adagrad).parameters.keys()
    states = {name for state in own.state.values() for name in state} - {"step", "sum"}
    more = sorted(map(str, states | (own.defaults.keys() - known)))
    if more:
        raise ConfigError(
            f"the optimizer is {type(own).__name__}, a class of torch's Adagrad with states or defaults of its own "
            f"({', '.join(more)}): on ZeRO 1 to 3 DeepSpeed builds an Adagrad without them; derive it from "
            "torch.optim.Optimizer, or use stage 0"
        )
