"""The identity of a save in the files of a checkpoint: of the model, of a pipeline's layers, and of the optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ds_parity.engine.internals.replaced import replaced, wrapped
from ds_parity.errors import CheckpointError

_IDENTITY: Final = "ds_parity_save"
_FILE: Final = "ds_parity_file"
_CONFIG: Final = "ds_config"
_MARK: Final = "ds_parity"
_OF_LAYERS: Final = "layer_"
_ENDING: Final = "-model_states.pt"


@dataclass(frozen=True, slots=True)
class Files:
    """What the files say that a rank has loaded.

    Attributes:
        saves: the identities of their saves; none of files without one.
        renamed: by the name of a file: that under which it was saved, where it is another.
    """

    saves: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)


@contextmanager
def marked(engine: Any, identity: str, begins: Callable[[], None]) -> Iterator[set[str]]:
    """Return a context in which the files that DeepSpeed writes have the identity of their save, and their own names.

    A save that is killed leaves files of an earlier save of the same tag, and a folder that was copied may have some of
    another, or one rank's under the name of another's. DeepSpeed loads such a mixture without an error: what the
    model's file says does not tell whose the optimizer's files are. Most have DeepSpeed's configuration in them, and
    the identity there. That of a pipeline's layer is a state dict of torch's, which has attributes of its own and keeps
    them (torch's `_metadata` is one). Files of experts, and those of a universal checkpoint, have neither.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.
        identity: of the save, the same on every rank.
        begins: is called before each file that this rank writes.

    Returns:
        The context, and the names of the files that this rank writes inside.
    """
    names: set[str] = set()
    # DeepSpeed writes `ds_config=self.config` (runtime/engine.py, _save_checkpoint and _save_zero_checkpoint, 0.19.8),
    # and reads nothing of it back but `use_data_before_expert_parallelism`.
    marks = isinstance(getattr(engine, "config", None), dict)

    def marking(save: Callable[..., Any]) -> Callable[..., Any]:
        def saved(state_dict: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            name = Path(path).name
            names.add(name)
            begins()
            return save(_with_mark(state_dict, name, identity) if marks else state_dict, path, *args, **kwargs)

        return saved

    with wrapped(engine.checkpoint_engine, "save", marking):
        yield names


def _with_mark(state_dict: Any, name: str, identity: str) -> Any:
    mark = {_IDENTITY: identity, _FILE: name}
    config = state_dict.get(_CONFIG) if isinstance(state_dict, dict) else None
    if isinstance(config, dict):
        return {**state_dict, _CONFIG: {**config, **mark}}
    if isinstance(state_dict, OrderedDict) and name.startswith(_OF_LAYERS) and name.endswith(_ENDING):
        marked_one = OrderedDict(state_dict)
        vars(marked_one).update({**vars(state_dict), _MARK: mark})
        return marked_one
    return state_dict


def _mark_of(state: Any) -> Mapping[str, Any]:
    config = state.get(_CONFIG) if isinstance(state, Mapping) else None
    found = config if config is not None else getattr(state, _MARK, None)
    return found if isinstance(found, Mapping) else {}


@contextmanager
def identities(engine: Any) -> Iterator[Files]:
    """Return a context, and what the files say that DeepSpeed loads inside.

    Args:
        engine: a bare DeepSpeed engine, of a pipeline or not.

    Raises:
        CheckpointError: in place of what is raised inside, where a file has another's name.
    """
    found = Files()
    load = engine.checkpoint_engine.load

    def noted(path: str, *args: Any, **kwargs: Any) -> Any:
        state = load(path, *args, **kwargs)
        mark = _mark_of(state)
        if isinstance(identity := mark.get(_IDENTITY), str):
            found.saves.add(identity)
            name = Path(path).name
            if mark.get(_FILE, name) != name:
                found.renamed[name] = mark[_FILE]
        return state

    try:
        with replaced(engine.checkpoint_engine, "load", noted):
            yield found
    except Exception as error:
        # One that lacks what is looked for in it ends in a KeyError.
        for name, saved_as in sorted(found.renamed.items()):
            raise CheckpointError(f"{renamed(name, saved_as)} ({type(error).__name__}: {error})") from error
        raise


def renamed(name: str, saved_as: str) -> str:
    """Return what it means that a file was saved under another name than it has, and the way out."""
    return (
        f"the file {name} was saved as {saved_as}: it has the states of another rank, or of another part of the model, "
        "which DeepSpeed takes where the shapes fit. Give the files their names again (copy the checkpoint anew); "
        "loading ends half way, so start a new engine"
    )
