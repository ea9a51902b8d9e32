"""DeepSpeed's wall-clock timers, and loops that run other than one forward of the engine before each backward."""

import contextlib

import pytest

from tests.hard.unforeseen.cells import STAGES, Watched
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()

TIMED = {
    "breakdown": {"wall_clock_breakdown": True},
    "profiler": {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}},
}
LOOPS = ("two-forwards", "module", "ahead", "raises", "rank-0-by-module")


@play.right(STAGES, [f"{timed}-{loop}" for timed in TIMED for loop in LOOPS])
def a_loop_is_timed(case):
    """Two forwards for a backward, engine.module(x), two forwards and then two backwards, a forward that raises."""
    timed, _, loop = case.variant.partition("-")
    watched = Watched(case.cell, **TIMED[timed])
    engine = watched.engine
    for index in range(6):
        if loop == "raises" and index == 3:
            with contextlib.suppress(RuntimeError):
                engine(*(one[:, :1] for one in watched.inputs(index)[:1]), None)
        if loop == "ahead" and index % 2 == 0:
            losses = [watched.loss(index), watched.loss(index + 1)]
        if loop == "two-forwards":
            loss = 0.25 * watched.loss(index) + 0.75 * watched.loss(index)
        elif loop == "module" or (loop == "rank-0-by-module" and watched.rank == 0):
            loss = engine.module(*watched.inputs(index))
        else:
            loss = losses[index % 2] if loop == "ahead" else watched.loss(index)
        engine.backward(loss, rollouts=2)
        engine.step()
        watched.noted(index)
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)
