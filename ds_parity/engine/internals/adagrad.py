"""Lets ZeRO 1 to 3 step the Adagrad that they were given, in place of one of DeepSpeed's own making."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_parity.engine.internals.replaced import replaced
from ds_parity.errors import ConfigError

_INITIALIZE: Final = "initialize_optimizer_states"


@contextmanager
def own_adagrad() -> Iterator[None]:
    """Return a context in which DeepSpeed may build an engine over an optimizer that is torch's Adagrad.

    Adagrad makes its states when it is built. So that there are some for its flat partitions, DeepSpeed builds another
    one, of the first one's defaults (stage_1_and_2.py and stage3.py, initialize_optimizer_states): without its groups
    and what they say, its class, and the schedulers that were built over it
    (tools/deepspeed_faults/adagrad_built_anew.py). Only the states are taken from it here.
    """
    with _initialized_by_its_own(DeepSpeedZeroOptimizer), _initialized_by_its_own(DeepSpeedZeroOptimizer_Stage3):
        yield


def _initialized_by_its_own(wrapper: type) -> AbstractContextManager[None]:
    initialize: Callable[[Any], None] = getattr(wrapper, _INITIALIZE)

    def initialized(self: Any) -> None:
        own = self.optimizer
        if isinstance(own, torch.optim.Adagrad):
            refuse_more(own)
        initialize(self)
        if self.optimizer is not own:
            own.state, self.optimizer = self.optimizer.state, own

    return replaced(wrapper, _INITIALIZE, initialized)


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
