"""The identity of a save in each file of a checkpoint that has DeepSpeed's configuration in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from ds_parity.engine.internals.replaced import replaced

_IDENTITY: Final = "ds_parity_save"
_CONFIG: Final = "ds_config"


def marked(engine: Any, identity: str) -> AbstractContextManager[None]:
    """Return a context in which the files that DeepSpeed writes have the identity of their save.

    A save that is killed leaves files of an earlier save of the same tag, and a folder that was copied may have some of
    another. DeepSpeed loads such a mixture without an error: what the model's file says does not tell whose the
    optimizer's files are. Files of experts, and those of a universal checkpoint, have no configuration, so no identity.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        identity: of the save, the same on every rank.
    """
    # DeepSpeed writes `ds_config=self.config` (runtime/engine.py, _save_checkpoint and _save_zero_checkpoint, 0.19.8),
    # and reads nothing of it back but `use_data_before_expert_parallelism`.
    config = getattr(engine, "config", None)
    if not isinstance(config, dict):
        return nullcontext()
    return replaced(engine, "config", {**config, _IDENTITY: identity})


@contextmanager
def identities(engine: Any) -> Iterator[set[str]]:
    """Return a context, and the identities of the files that DeepSpeed loads inside; none of files without one.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
    """
    found: set[str] = set()
    load = engine.checkpoint_engine.load

    def noted(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        config = state.get(_CONFIG) if isinstance(state, Mapping) else None
        if isinstance(config, Mapping) and isinstance(identity := config.get(_IDENTITY), str):
            found.add(identity)
        return state

    with replaced(engine.checkpoint_engine, "load", noted):
        yield found
