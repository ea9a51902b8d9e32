"""States of the optimizer that `offload_states()` has moved away, and nobody has brought back."""

from __future__ import annotations

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import WindowError


def refuse_moved_away(engine: Engine, window: int) -> None:
    """Raise WindowError where states were moved away, before a backward or a step that needs them.

    On ZeRO 1 and 2 the step ends in an IndexError, and on ZeRO 3 the backward in an AttributeError (0.19.8).

    Args:
        engine: DeepSpeed's own.
        window: index of the open window (>= 0).
    """
    moved = getattr(engine.optimizer, "offloaded_states", None)
    if moved:
        names = ", ".join(sorted(str(getattr(state, "value", state)) for state in moved))
        raise WindowError(
            f"a pass of window {window} while offload_states() has moved states away ({names}): DeepSpeed neither adds "
            "to them nor steps there; call engine.reload_states() before the next backward()"
        )
