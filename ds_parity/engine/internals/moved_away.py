"""States that `offload_states()` has moved away, and nobody has brought back."""

from __future__ import annotations

from typing import Final

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import WindowError

# What a step needs, and no backward: a loop may train all passes of a window without them (OffloadStateTypeEnum of
# runtime/zero/offload_config.py, 0.19.8).
_OF_STEPS: Final = frozenset({"optim_states", "hp_params"})


def refuse_moved_away(engine: Engine, window: int, *, steps: bool) -> None:
    """Raise WindowError where states were moved away, before a backward or a step that needs them.

    On ZeRO 1 and 2 the step ends in an IndexError, and on ZeRO 3 the backward in an AttributeError or a KeyError
    (0.19.8).

    Args:
        engine: DeepSpeed's own, of a pipeline or not.
        window: index of the open window (>= 0).
        steps: what comes may step the optimizer; else it is a backward.
    """
    moved = {str(getattr(state, "value", state)) for state in getattr(engine.optimizer, "offloaded_states", ())}
    needed = moved if steps else moved - _OF_STEPS
    if needed:
        what = "the step" if steps else "a pass"
        raise WindowError(
            f"{what} of window {window} while offload_states() has moved states away that it needs "
            f"({', '.join(sorted(needed))}): call engine.reload_states() before it"
        )
