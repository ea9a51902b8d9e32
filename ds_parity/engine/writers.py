"""Which engines of this process go on in a checkpoint's folder: another one's save would replace their files."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from ds_parity.engine.unloadable import folder_of

_MOMENTS: Final = count()


class Writer:
    """An engine as one that saves checkpoints.

    An actor and a critic that are saved under one tag of one folder leave one checkpoint. It loads into both without an
    error where they have one shape. A run that is begun when the one before has ended may replace what that has saved.
    """

    def __init__(self) -> None:
        self._built = self._used = next(_MOMENTS)

    def replaces_another(self, save_dir: str, tag: str) -> bool:
        """Whether a save would replace the checkpoint of an engine that was in use since this one was built.

        Args:
            save_dir: as in DeepSpeed.
            tag: name of the checkpoint.
        """
        try:
            folder = (Path(save_dir) / tag).resolve()
            writers = _WRITERS.get(folder, ())
            return self not in writers and any(one._used > self._built for one in writers) and folder.is_dir()
        except (OSError, ValueError, TypeError):
            # DeepSpeed says what is wrong with the folder, and the other ranks hear of it.
            return False

    def goes_on_in(self, save_dir: str, tag: Any, *, universal: bool = False) -> None:
        """Note that the engine has saved a checkpoint, or has loaded it, so that it may save it again.

        Args:
            save_dir: as in DeepSpeed.
            tag: name of the checkpoint; None for the one that `latest` names.
            universal: a universal checkpoint was loaded.
        """
        self._used = next(_MOMENTS)
        for place in [one for one, writers in _WRITERS.items() if not writers]:
            del _WRITERS[place]
        folder = folder_of(save_dir, tag, universal=universal)
        if folder is not None:
            _WRITERS.setdefault(folder.resolve(), WeakSet()).add(self)

    def end(self) -> None:
        """Note that the engine is destroyed: what it has saved may be replaced."""
        for writers in _WRITERS.values():
            writers.discard(self)


_WRITERS: Final[dict[Path, WeakSet[Writer]]] = {}
