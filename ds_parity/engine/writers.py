"""Which engines of this process save in a checkpoint's folder: another one's save would replace their files."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from ds_parity.engine.unloadable import folder_of

_MOMENTS: Final = count()


class Writer:
    """An engine as one that saves checkpoints.

    An actor and a critic that are saved under one tag of one folder leave one checkpoint. It loads into both without an
    error where they have one shape. A run that is begun when the one before has ended may replace what that has saved,
    and so may one that has loaded it.
    """

    def __init__(self) -> None:
        self._built = self._used = next(_MOMENTS)
        # When it has last saved or loaded, by folder.
        self._own: dict[Path, int] = {}

    def replaces_another(self, save_dir: str, tag: str) -> bool:
        """Whether a save would replace the checkpoint of an engine that is in use beside this one.

        Args:
            save_dir: as in DeepSpeed.
            tag: name of the checkpoint.
        """
        folder = _resolved(save_dir, tag)
        if folder is None:
            return False
        others = {one: saved for one, saved in _SAVED.get(folder, {}).items() if one is not self}
        if folder in self._own:
            replaces = any(saved > self._own[folder] for saved in others.values())
        else:
            replaces = any(one._used > self._built for one in others)
        return replaces and folder.is_dir()

    def has_saved(self, save_dir: str, tag: str) -> None:
        """Note that the engine has saved a checkpoint.

        Args:
            save_dir: as in DeepSpeed.
            tag: name of the checkpoint.
        """
        for place in [one for one, writers in _SAVED.items() if not writers]:
            del _SAVED[place]
        folder = _resolved(save_dir, tag)
        if folder is not None:
            self._used = self._own[folder] = next(_MOMENTS)
            _SAVED.setdefault(folder, WeakKeyDictionary())[self] = self._used

    def has_loaded(self, load_dir: str, tag: Any, *, universal: bool) -> None:
        """Note that the engine goes on from a checkpoint, and may save it again.

        Args:
            load_dir: as in DeepSpeed.
            tag: name of the checkpoint; None for the one that `latest` names.
            universal: a universal checkpoint was loaded.
        """
        folder = folder_of(load_dir, tag, universal=universal)
        place = None if folder is None else _resolved(str(folder), "")
        if place is not None:
            self._own[place] = next(_MOMENTS)

    def end(self) -> None:
        """Note that the engine is destroyed: what it has saved may be replaced."""
        for writers in _SAVED.values():
            writers.pop(self, None)


# When which engine has last saved in a folder.
_SAVED: Final[dict[Path, WeakKeyDictionary[Writer, int]]] = {}


def _resolved(folder: str, tag: str) -> Path | None:
    """Return where a folder is; None where DeepSpeed will say what is wrong with it, and the other ranks hear of it."""
    try:
        return (Path(folder) / tag).resolve()
    except (OSError, RuntimeError, ValueError, TypeError):
        return None
