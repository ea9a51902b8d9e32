"""Parameters, optimizers and learning rates that change on the way step as an fp64 oracle does."""

import pytest
import torch

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Watched
from tests.hard.unforeseen.oracle import Net
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()


def in_groups(model, **options):
    """Body and head, each with a learning rate of its own; the body decays."""
    body, head = list(model.body.parameters()), list(model.head.parameters())
    groups = [{"params": body, "lr": 0.05, "weight_decay": 0.1}, {"params": head, "lr": 0.2, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, **options)


@play.right(CELLS)
def groups_are_edited_between_windows(case):
    """The rate and the decay of every group change behind the second step."""
    model = Net()
    groups = [{**group, "params": group["params"]} for group in in_groups(model).param_groups]
    watched = Watched(case.cell, model=model, by=in_groups, given={"model_parameters": groups})
    for start in (0, 4):
        watched.passes(range(start, start + 4))
        for optimizer in (watched.engine.optimizer, watched.oracle.optimizer):
            for group in optimizer.param_groups:
                group.update(lr=0.5 * group["lr"], weight_decay=0.3)
    return watched.found([list(watched.engine.last_step.lr)], [[0.025, 0.1]])


@play.right(CELLS)
def a_schedule_is_stepped_by_hand(case):
    """The caller's optimizer has momentum, and its scheduler is stepped by the loop, at boundaries."""
    model = Net()
    client = in_groups(model, momentum=0.9)
    watched = Watched(
        case.cell, model=model, by=lambda m: in_groups(m, momentum=0.9), optimizer=False, given={"optimizer": client}
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))
        for one in (client, watched.oracle.optimizer)
    ]
    for start in range(0, 8, 2):
        watched.passes(range(start, start + 2))
        for schedule in schedules:
            schedule.step()
    return watched.found()


@play.right(STAGES)
def makers_are_given_in_place_of_objects(case):
    """Functions that make the optimizer and the scheduler; the rate is halved by every step."""
    given = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "model_parameters": list((model := Net()).parameters()),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    }
    watched = Watched(case.cell, model=model, optimizer=False, given=given)
    schedule = torch.optim.lr_scheduler.StepLR(watched.oracle.optimizer, 1, 0.5)
    for start in range(0, 8, 2):
        watched.passes(range(start, start + 2))
        schedule.step()
    return watched.found([list(watched.engine.last_step.lr)], [[0.0125]])


OPTIMIZERS = {
    "momentum": lambda them: torch.optim.SGD(them, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True),
    "upwards": lambda them: torch.optim.SGD(them, lr=0.02, maximize=True),
    "AdamW": lambda them: torch.optim.AdamW(them, lr=0.02, weight_decay=0.1),
    "AMSGrad": lambda them: torch.optim.Adam(them, lr=0.02, amsgrad=True),
    "Adagrad": lambda them: torch.optim.Adagrad(them, lr=0.05),
    "NAdam": lambda them: torch.optim.NAdam(them, lr=0.02),
    "Adamax": lambda them: torch.optim.Adamax(them, lr=0.02),
    "ASGD": lambda them: torch.optim.ASGD(them, lr=0.02),
}


@play.right([Cell(0), Cell(2), Cell(3, offload=True)], OPTIMIZERS, bound=2e-6)
def optimizers_that_deepspeed_has_not_tested(case):
    """With clipping; those that divide by the root of a gradient's square make more of its rounding."""
    made, model = OPTIMIZERS[case.variant], Net()
    watched = Watched(
        case.cell,
        model=model,
        clip=0.3,
        by=lambda right: made(right.parameters()),
        optimizer=False,
        given={"optimizer": made(model.parameters())},
    )
    watched.passes(range(8))
    return watched.found()


CLIPS = {"to-nothing": 1e-12, "hard": 1e-3, "hardly": 1e6, "never": 1e30}


@play.right(CELLS, CLIPS)
def clipping_is_extreme(case):
    """From a norm that leaves nothing of a gradient to one that no gradient has."""
    watched = Watched(case.cell, clip=CLIPS[case.variant])
    watched.passes(range(8))
    return watched.found([watched.engine.last_step.grad_norm], [watched.oracle.norms[-1]])


@play.right(CELLS)
def parameters_are_frozen_from_the_start(case):
    """A weight of one layer and a bias of the other, handed over with the others."""
    model = Net()
    model.body.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    watched = Watched(case.cell, model=model)
    watched.passes(range(6))
    return watched.found()


@play.right(CELLS, ["weight", "group"])
def parameters_rest_for_windows(case):
    """A weight, or all that is in one group of the optimizer, for two windows; then it is trained again."""
    model = Net()
    groups = [{"params": list(one.parameters()), "lr": 0.1} for one in (model.body, model.head)]
    watched = Watched(case.cell, target=4, model=model, given={"model_parameters": groups})
    for index in range(6):
        for own in (watched.engine.module, watched.oracle.model):
            for one in [own.body.weight] if case.variant == "weight" else own.body.parameters():
                one.requires_grad_(index not in (2, 3))
        watched.passes([index])
    return watched.found()


@play.right(CELLS)
def parameters_rest_while_passes_are_uneven(case):
    """A bias rests for the second window, where rank 1 has run out of data and stands in."""
    watched, count = Watched(case.cell, target=7, clip=0.4), (6, 1)
    stream = [ds_parity.MicroBatch({"index": index}, rollouts=2) for index in range(count[watched.rank])]
    for batch in watched.engine.passes(stream):
        watched.engine.module.head.bias.requires_grad_(watched.engine.window.index != 1)
        watched.engine.backward(watched.loss(batch.inputs["index"]))
        watched.engine.step()
    for index in range(max(count)):
        watched.oracle.model.head.bias.requires_grad_(len(watched.oracle.steps) != 1)
        watched.noted(index, *(2 if index < own else 0 for own in count))
    return watched.found()


class Optional(Net):
    """Leaves its head out where it is told to."""

    def forward(self, x, y, whole=True):
        return super().forward(x, y) if whole else (torch.tanh(self.body(x)).sum(-1) - y).pow(2).mean()


@play.right(CELLS)
def windows_leave_parameters_out(case):
    """On all ranks alike: in both passes of a window, in its first one, and in none."""
    watched = Watched(case.cell, model=Optional())
    for index, whole in enumerate((1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1)):
        watched.engine.backward(watched.loss(index, 2, bool(whole)), rollouts=2)
        watched.engine.step()
        watched.noted(index, more=lambda rank, whole=whole: (bool(whole),))
    return watched.found()


@play.right(STAGES)
def the_rate_is_set_between_windows(case):
    """In the optimizer's groups, as loops do that have a schedule of their own."""
    watched = Watched(case.cell, target=4)
    rates = []
    for index, rate in enumerate((0.1, 0.03, 0.0, 0.2)):
        for optimizer in (watched.engine.optimizer, watched.oracle.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate
        watched.passes([index])
        rates += watched.engine.last_step.lr
    return watched.found(rates, [0.1, 0.03, 0.0, 0.2])


@play.right([Cell(0)])
def a_group_joins_later(case):
    """The head is given to the caller's optimizer behind the third step."""
    model = Net()
    client = torch.optim.SGD(model.body.parameters(), lr=0.1)

    def of_body(right):
        return torch.optim.SGD(right.body.parameters(), lr=0.1)

    watched = Watched(case.cell, target=4, model=model, by=of_body, optimizer=False, given={"optimizer": client})
    watched.passes(range(3))
    client.add_param_group({"params": list(model.head.parameters())})
    watched.oracle.optimizer.add_param_group({"params": list(watched.oracle.model.head.parameters())})
    watched.passes(range(3, 6))
    return watched.found([len(watched.engine.last_step.lr)], [2])


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)
