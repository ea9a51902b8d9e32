"""Gradients that a loop writes before a step, which may be clipped, or clears behind it."""

import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from tests.hard.unforeseen.cells import CELLS, Cell, Found, Watched, config, distance, engine_of, weights_of
from tests.hard.unforeseen.oracle import RATE, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
CLIP = 0.01


@play.right(CELLS[1:], ["all", "clipped", "one", "one-clipped"])
@play.right([Cell(1, offload=True), Cell(2, offload=True)], ["moved-clipped"])
def a_gradient_is_written(case):
    """Ones in every gradient, or in that of the head's bias alone, which has fewer elements than there are ranks."""
    clip = CLIP if "clipped" in case.variant else 0.0
    engine = engine_of(config(case.cell, 4, clip=clip))
    if "moved" in case.variant:  # reload_states() links parameters anew
        engine.offload_states()
        engine.reload_states()
    norms, right = [], []
    before = weights_of(engine)
    for index in range(4):
        engine.backward(engine(*(one.to(engine.device) for one in sample(index % 2, index, 2))), rollouts=1)
        if engine.is_gradient_accumulation_boundary():
            named = dict(engine.module.named_parameters())
            gradients = {name: safe_get_full_grad(one) * engine.window.correction for name, one in named.items()}
            for name in ["head.bias"] if case.variant.startswith("one") else named:
                gradients[name] = torch.ones_like(gradients[name])
                safe_set_full_grad(named[name], gradients[name] / engine.window.correction)
            norm = float(torch.cat([one.flatten() for one in gradients.values()]).norm())
            for name, gradient in gradients.items():
                before[name] -= RATE * (min(1.0, clip / norm) if clip else 1.0) * gradient.cpu().double()
            right.append(norm)
        engine.step()
        if not engine.window.passes:
            norms.append(engine.last_step.grad_norm)
    return Found(distance(weights_of(engine), before), norms, right)


@play.right(CELLS, ["idle", "weighs-nothing"])
def they_are_cleared_behind_a_window_without_weight(case):
    """All ranks are idle in a window of the caller, or weigh nothing; then zero_grad(), as behind every step."""
    nothing = case.variant == "weighs-nothing"
    section = {"boundary": "caller", "loss_weight": "weight"}
    watched = Watched(case.cell, section=section)
    watched.oracle._closes_at = 10**9
    engine, weighs = watched.engine, {"weight": 2.0, "rollouts": 2}
    for window in range(5):
        for index in (2 * window, 2 * window + 1):
            if window not in (0, 2):
                engine.backward(watched.loss(index), **weighs)
                watched.noted(index)
            elif nothing:
                engine.backward(watched.loss(index), **{**weighs, "weight": 0.0})
            else:
                engine.idle(watched.loss(index))
        engine.step()
        if window not in (0, 2):
            watched.oracle.step()
        engine.optimizer.zero_grad()
        engine.zero_grad()
    return Found(watched.apart(), [engine.global_steps], [3])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_the_step_is_that_of_what_is_there(outcomes, case):
    outcomes.assert_right(case)
