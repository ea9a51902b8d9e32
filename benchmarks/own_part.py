"""How much of a window runs in ds_parity itself: what the noise of DeepSpeed's own collectives does not hide."""

import time
from functools import partial

# What ds_parity calls in DeepSpeed, of each of which a window's time contains many.
CALLED = ("forward", "backward", "step", "allreduce_gradients")


class OwnPart:
    """Times what an engine's window does outside of DeepSpeed.

    Waiting for other ranks' counts is ds_parity's, though DeepSpeed's next collective would wait for the same ranks.
    What hooks do inside a backward is DeepSpeed's here: less than 0.1 % of it.

    Args:
        engine: the bare DeepSpeed engine, under the proxy.

    Attributes:
        shares: of each window, the part of its time outside of DeepSpeed (0 to 1).
    """

    def __init__(self, engine):
        self.shares = []
        self._inside = 0.0
        self._depth = 0
        for name in CALLED:
            setattr(engine, name, partial(self._timed, getattr(engine, name)))

    def _timed(self, called, *args, **kwargs):
        # DeepSpeed calls itself: what is inside is timed once.
        self._depth += 1
        begun = time.perf_counter()
        try:
            return called(*args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self._inside += time.perf_counter() - begun

    def of(self, window):
        """Return the window as a function that notes its share."""

        def noted():
            self._inside, begun = 0.0, time.perf_counter()
            window()
            taken = time.perf_counter() - begun
            self.shares.append(1 - self._inside / taken)

        return noted
