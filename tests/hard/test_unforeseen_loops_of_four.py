"""Four ranks: loops with several terms that are drawn at random, and what other modules play on two ranks."""

import pytest
import torch

from tests.hard.test_unforeseen_accidents import (
    MODES,
    a_backward_is_interrupted_and_the_loop_finishes,
    a_block_is_interrupted_and_the_loop_finishes,
    a_first_gradient_comes_in_window_3,
    actor_critic_and_reference_take_turns,
    parameters_rest_in_windows_of_the_caller,
)
from tests.hard.test_unforeseen_random_loops import Loop
from tests.hard.test_unforeseen_surroundings import overflows_in_windows_of_the_caller
from tests.hard.unforeseen.cells import STAGES, Cell, Watched
from tests.hard.unforeseen.oracle import sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios(ranks=4)

play.right(STAGES, ["0", "3"])(actor_critic_and_reference_take_turns)
play.right(STAGES, [f"{mode}-0.3" for mode in MODES])(a_first_gradient_comes_in_window_3)
play.right(STAGES, ["caller", "caller-block"])(parameters_rest_in_windows_of_the_caller)
play.right(STAGES, ["resumes"])(overflows_in_windows_of_the_caller)
play.refused(STAGES, dict.fromkeys(MODES, "WindowError: window 0 has a backward()"))(
    a_backward_is_interrupted_and_the_loop_finishes
)
play.refused(STAGES[1:], "WindowError: window 1 has a backward()")(a_block_is_interrupted_and_the_loop_finishes)


@play.right(STAGES, [str(seed) for seed in range(100, 110)], bound=3e-6)
def a_plan_is_run(case):
    """Several terms, in windows of either kind, known ahead by any way; checkpoints and more between them."""
    return Loop(case).run()


@play.right([Cell(0), Cell(1), Cell(2), Cell(3)], ["weight", "token"])
def a_rank_is_idle_for_whole_windows(case):
    """Rank 2 never has anything, and rank 3 in every other window; one rank's weights are a million times another's."""
    watched = Watched(case.cell, section={"boundary": "caller", "loss_weight": case.variant})
    watched.oracle._closes_at = 10**9
    for window in range(6):
        weights = [3, 2_000_000, 0, 5 * (window % 2)]
        for index in (2 * window, 2 * window + 1):
            own = weights[watched.rank]
            counts = {"tokens": own} if case.variant == "token" else {"weight": torch.tensor(float(own))}
            if own:
                watched.engine.backward(watched.loss(index), rollouts=1, **counts)
            elif case.cell.stage > 1:
                watched.engine.idle(watched.loss(index) * float("nan"))
            _told(watched, index, weights)
        watched.engine.step()
        watched.oracle.step()
    return watched.found()


def _told(watched, index, weights):
    for rank, weight in enumerate(weights):
        if weight:
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(weight, lambda model, x=x, y=y: model(x, y))
    watched.oracle.end_pass(sum(1 for weight in weights if weight))


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
