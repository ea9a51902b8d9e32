"""DeepSpeed's wall-clock timers, which expect one forward of the engine before each backward.

They run with `wall_clock_breakdown` and with the flops profiler. Each has an assertion that it rests where it starts,
and runs where it stops. Two forwards before one backward start those of the backward twice, `engine.module(x)` does not
start them at all, and a forward that raised never stops its own. The AssertionError that follows comes in the middle of
a backward, on some ranks only where these loop in another way.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_parity.engine.internals.surface import Engine


def let_timers_be(engine: Engine) -> None:
    """Let a timer that runs go on where it would be started again, and one that rests rest where it would be stopped.

    Args:
        engine: the bare DeepSpeed engine.
    """
    start, stop = engine._start_timers, engine._stop_timers

    def start_those_at_rest(timer_names: Iterable[str]) -> None:
        start([name for name in timer_names if not engine.timers(name).started_])

    def stop_those_that_run(timer_names: Iterable[str]) -> None:
        stop([name for name in timer_names if engine.timers(name).started_])

    engine._start_timers = start_those_at_rest  # type: ignore[method-assign]
    engine._stop_timers = stop_those_that_run  # type: ignore[method-assign]


def start_backward_timers(engine: Engine) -> None:
    """Start those of a backward, as DeepSpeed does in a hook of what `engine.forward` has given."""
    timers = engine.engine_timers
    engine._start_timers([*timers.backward_timers, *timers.backward_inner_timers])
