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


class Branches(torch.nn.Module):
    """Two weights, of which a forward may use the first alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(3, 1, bias=False) for _ in range(2))
        for one in self.parameters():
            torch.nn.init.zeros_(one)

    def forward(self, x, both):
        """Return a number: each weight's gradient is x."""
        said = self.first(x).sum()
        return said + self.second(x).sum() if both else said


@play.right([Cell(stage, offload=True) for stage in (1, 2, 3)], ["read", "written", "announced"])
def what_the_last_pass_left_out_is_read_and_changed(case):
    """A mask on the gradients before the step; the window's last pass has used one of two branches."""
    announces = case.variant == "announced"
    section = {"boundary": "caller"} if announces else {"lookahead": 0}
    engine = engine_of(config(case.cell, 4, section=section), Branches())
    read, right = [], []
    for scale in (1.0, 10.0):
        for number in range(2):
            if announces:
                engine.set_gradient_accumulation_boundary(number == 1)
            x = torch.full((1, 3), scale * (1 + number), device=engine.device)
            engine.backward(engine(x, both=number == 0), rollouts=1)
            if number == 1:
                for one in engine.module.parameters():
                    gradient = safe_get_full_grad(one)
                    if not announces:  # the window's total is not known before its step
                        read.append(float(gradient.mean()) * engine.window.correction)
                    if case.variant != "read":
                        safe_set_full_grad(one, gradient * 1.0)
            if not announces or number == 1:
                engine.step()
        right += [] if announces else [1.5 * scale, 0.5 * scale]
    moved = {"first.weight": -RATE * 16.5 * torch.ones(1, 3), "second.weight": -RATE * 5.5 * torch.ones(1, 3)}
    return Found(distance(weights_of(engine), moved), read, right)


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
