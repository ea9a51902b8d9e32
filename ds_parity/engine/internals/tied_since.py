"""Weights that are one in this model, and were several in the one that was saved: all but one of them would be lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final

import torch

from ds_parity.engine.internals.checkpoints import looked_at
from ds_parity.engine.internals.model_names import name_of_state, names_of_one
from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import CheckpointError

# Of a checkpoint of ZeRO: the names of what it steps and of what is frozen, each weight by one of its names, and other
# names for some of these (runtime/engine.py, _save_checkpoint, 0.19.8).
_MODEL: Final = "module"
_STEPPED: Final = "param_shapes"
_FROZEN: Final = "frozen_param_shapes"
_SHARED: Final = "shared_params"


@contextmanager
def refusing_to_tie(engine: Engine, *, custom: bool) -> Iterator[None]:
    """Return a context in which a load raises where a checkpoint has several weights for one of the model's.

    torch writes them into it one behind the other, and the optimizer's states are of one of them. So bare DeepSpeed
    goes on from the last, or throws it away in the next step (0.19.8; tools/deepspeed_faults/tied_since_saved.py).

    Args:
        engine: a bare DeepSpeed engine, of no pipeline.
        custom: a function of the caller's loads the model, and says which of them it takes.

    Raises:
        CheckpointError: so it is.
    """
    if custom:
        yield
        return

    with looked_at(engine, partial(refuse_parted, engine)):
        yield


def refuse_parted(engine: Engine, checkpoint: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint has several weights for one of the model's.

    Args:
        engine: a bare DeepSpeed engine, of no pipeline.
        checkpoint: what is in its file of the model.
    """
    values, shared = checkpoint.get(_MODEL) or {}, checkpoint.get(_SHARED) or {}
    stepped: Iterable[Mapping[str, Any]] = checkpoint.get(_STEPPED) or ()
    saved = set(chain(chain.from_iterable(stepped), checkpoint.get(_FROZEN) or ())) - set(shared)
    named = set(map(name_of_state, saved))
    for names in names_of_one(engine.module):
        # Two names of one weight have one value. Where there is none, the lists of weights tell.
        unseen = [name for name in names if name in named and not _is_whole(name, values)]
        if parted := _parted_values(names, values) or (unseen[1:] and unseen):
            raise CheckpointError(
                f"{' and '.join(map(repr, parted[:2]))} are one weight in this model, and were two when the checkpoint "
                "was saved: one of them would be lost, and the optimizer's states may be those of the other. Load it "
                "into a model that does not tie them, or with load_optimizer_states=False and a custom_load_fn that "
                "takes one of them. Loading ends half way, so start a new engine"
            )


def _is_whole(name: str, given: Mapping[str, Any]) -> bool:
    # ZeRO 3 saves an empty tensor in the place of what it has partitioned.
    return isinstance(one := given.get(name), torch.Tensor) and bool(one.numel())


def _parted_values(names: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """The first two names whose values differ; those of a weight that was one are equal, NaN or not."""
    whole = [name for name in names if _is_whole(name, given)]
    for pair in pairwise(whole):
        first, second = (given[name] for name in pair)
        if first.data_ptr() != second.data_ptr() and not _equal(first, second):
            return list(pair)
    return []


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second.to(first), rtol=0, atol=0, equal_nan=True)
