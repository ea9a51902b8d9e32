"""Models, parameters and optimizers that a loop owns, shares, edits, or gives in other forms."""

import copy
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

import ds_parity
from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, config, weights_of
from tests.hard.unforeseen.oracle import RATE, Net
from tests.hard.unforeseen.scenarios import Scenarios
from tests.hard.unforeseen.whole_windows import Beside

play = Scenarios()


@play.right(CELLS, ["destroyed", "let-go", "kept"])
def a_second_engine_trains_the_same_model(case):
    """Behind a first one, as a search over settings does."""
    model = Net()
    first = Beside(case.cell, model=model)
    first.passes(range(4))
    first.engine.finish()
    if case.variant == "destroyed":
        first.engine.destroy()
    trained = weights_of(first.engine)
    if case.variant != "kept":
        first.engine = None
    fresh = model
    if case.cell.stage == 3:  # its parameters are partitioned: a new model is made of what was trained
        fresh = Net()
        fresh.load_state_dict({name: one.float() for name, one in trained.items()})
    second = Beside(case.cell, model=fresh, right=first.model)
    second.passes(range(4, 8))
    return second.found()


@play.right([Cell(0)], ["momentum", "plain", "unused"])
@play.refused(STAGES[1:], dict.fromkeys(("momentum", "plain", "unused"), "ConfigError: optimizer= contains"))
def an_optimizer_is_given_to_a_second_engine(case):
    """The same object, behind destroy()."""
    model = Net()
    momentum = 0.5 if case.variant == "momentum" else 0.0

    def by(right):
        return torch.optim.SGD(right.parameters(), lr=RATE, momentum=momentum)

    optimizer = by(model)
    first = Beside(case.cell, model=model, by=by, optimizer=False, given={"optimizer": optimizer})
    if case.variant != "unused":
        first.passes(range(4))
    first.engine.destroy()
    second = Beside(
        case.cell,
        model=model,
        right=first.model,
        by=lambda _: first.optimizer,
        optimizer=False,
        given={"optimizer": optimizer},
    )
    second.model = first.model
    second.passes(range(4, 8))
    return second.found()


@play.refused(STAGES, dict.fromkeys(("copy", "partly"), "ConfigError: optimizer= contains 4 parameters, of which "))
def the_optimizer_is_of_another_model(case):
    """It was made before the model was copied, or replaced in part."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    other = copy.deepcopy(model)
    if case.variant == "partly":
        other.body = model.body
    watched = Beside(case.cell, model=other, optimizer=False, given={"optimizer": optimizer})
    watched.passes(range(4))
    return watched.found()


@play.right(CELLS, ["0.0", "0.3"])
def a_part_is_trained_and_nothing_is_frozen(case):
    """Only the head is given to the optimizer: the body has gradients that nobody steps."""
    model, clip = Net(), float(case.variant)
    watched = Beside(
        case.cell,
        model=model,
        clip=clip,
        by=lambda right: torch.optim.SGD(right.head.parameters(), lr=RATE),
        given={"model_parameters": list(model.head.parameters())},
    )
    if case.cell.stage == 0:  # DeepSpeed clips by the norm of all that has a gradient there
        watched.optimizer.add_param_group({"params": list(watched.model.body.parameters()), "lr": 0.0})
    watched.passes(range(8))
    return watched.found()


@play.right([Cell(0)], ["engine", "client"])
@play.refused(STAGES[1:], dict.fromkeys(("engine", "client"), "WindowError: add_param_group() on ZeRO stage"))
def a_part_joins_the_optimizer_later(case):
    """It was in the model from the start, and is added to the optimizer as a group of its own."""
    model = Net()
    client = torch.optim.SGD(model.head.parameters(), lr=RATE)
    watched = Beside(
        case.cell,
        model=model,
        by=lambda right: torch.optim.SGD(right.head.parameters(), lr=RATE),
        optimizer=False,
        given={"optimizer": client},
    )
    watched.passes(range(4))
    group = {"params": list(model.body.parameters()), "lr": RATE}
    (watched.engine.optimizer if case.variant == "engine" else client).add_param_group(group)
    watched.optimizer.add_param_group({"params": list(watched.model.body.parameters()), "lr": RATE})
    watched.passes(range(4, 8))
    return watched.found()


@play.right(CELLS)
def clipping_changes_on_the_way(case):
    """By the attribute that DeepSpeed's optimizer reads, or by its configuration on ZeRO 0."""
    watched = Beside(case.cell, clip=0.5)
    for number, clip in enumerate((0.5, 0.05, 5.0)):
        if case.cell.stage:
            watched.engine.optimizer.clip_grad = clip
        else:
            watched.engine._config.gradient_clipping = clip
        watched.clip = clip
        watched.passes(range(2 * number, 2 * number + 2))
    return watched.found()


FORMS = {
    "omitted": lambda model: {},
    "generator": lambda model: {"model_parameters": model.parameters()},
    "named": lambda model: {"model_parameters": model.named_parameters()},
    "filter": lambda model: {"model_parameters": filter(lambda one: one.requires_grad, model.parameters())},
    "groups": lambda model: {
        "model_parameters": [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": RATE}]
    },
    "tuple": lambda model: {"model_parameters": tuple(model.parameters())},
}


@play.right(STAGES, FORMS)
def parameters_are_given_in_other_forms(case):
    model = Net()
    watched = Beside(case.cell)
    watched.engine = ds_parity.initialize(model=model, config=config(case.cell), **FORMS[case.variant](model))[0]
    watched.passes(range(5))
    return watched.found()


@play.right(STAGES)
def an_optimizer_of_named_parameters(case):
    """And a checkpoint of it in the middle."""

    def by(model):
        return torch.optim.AdamW(
            [{"params": model.body.named_parameters()}, {"params": model.head.named_parameters(), "lr": 0.01}], lr=0.02
        )

    model = Net()
    watched = Beside(case.cell, model=model, by=by, optimizer=False, given={"optimizer": by(model)})
    watched.passes(range(4))
    watched.engine.save_checkpoint(case.folder, "a")
    watched.engine.load_checkpoint(case.folder, "a")
    watched.passes(range(4, 8))
    return watched.found()


@play.right(CELLS, ["between", "inside"])
def weights_are_read_and_written(case):
    """By DeepSpeed's safe_get and safe_set, between windows; inside a window they are read."""
    watched = Beside(case.cell)
    named = dict(watched.engine.module.named_parameters())
    read = []
    for number in range(3):
        for index in (2 * number, 2 * number + 1):
            if case.variant == "inside" or index % 2 == 0:
                for name, one in named.items():
                    value = one.detach() if case.cell.stage == 0 else safe_get_full_fp32_param(one)
                    read.append(float((value.double() - watched.right()[name]).abs().max()) < 1e-6)
            watched.passes([index])
        if case.cell.stage == 0:  # on the others the module's copy follows in a step
            named["body.weight"].data.mul_(0.5)
            watched.model.body.weight.data.mul_(0.5)
    return watched.found([all(read)], [True])


@play.right(STAGES[1:])
def a_model_of_fp64(case):
    model = Net().double()
    watched = Beside(case.cell, model=model)
    plain = watched.inputs
    watched.inputs = lambda *args: [one.double() for one in plain(*args)]
    watched.passes(range(6))
    return watched.found()


@play.right(STAGES[:3])
def the_module_is_wrapped_for_ddp(case):
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    watched = Beside(case.cell, model=DistributedDataParallel(model), right=model)
    watched.passes(range(6))
    watched.right = lambda: {f"module.{name}": one for name, one in watched.model.named_parameters()}
    return watched.found()


@play.right(STAGES, ["hooks", "module-hooks", "forward-hooks", "accumulated"])
def hooks_of_the_loop_watch(case):
    """They count and change nothing; one changes each gradient as it comes."""
    model, seen = Net(), []
    watched = Beside(case.cell, model=model)
    if case.variant == "hooks":
        for one in model.parameters():
            one.register_hook(lambda gradient: 0.5 * gradient)
        for one in watched.model.parameters():
            one.register_hook(lambda gradient: 0.5 * gradient)
    elif case.variant == "module-hooks":
        model.body.register_full_backward_hook(lambda *args: seen.append(1))
        model.head.register_full_backward_pre_hook(lambda *args: seen.append(1))
    elif case.variant == "forward-hooks":
        model.body.register_forward_hook(lambda module, args, out: 2 * out)
        watched.model.body.register_forward_hook(lambda module, args, out: 2 * out)
        watched.engine.register_forward_pre_hook(lambda *args: seen.append(1))
    else:
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
    watched.passes(range(6))
    return watched.found()


@play.right(STAGES, ["copied", "pickled", "averaged"])
def the_model_is_copied_inside_a_window(case):
    from torch.optim.swa_utils import AveragedModel

    watched = Beside(case.cell)
    for index in range(6):
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step()
        watched.has(index)
        if index % 2:
            watched.steps()
        module = watched.engine.module
        if case.variant == "copied":
            copy.deepcopy(module)
        elif case.variant == "pickled":
            Path(case.folder).mkdir(exist_ok=True)
            torch.save(module.state_dict(), f"{case.folder}/{watched.rank}.pt")
        else:
            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                AveragedModel(module)
    return watched.found()


@play.right(STAGES)
def a_plateau_is_told_its_metric(case):
    """By step(lr_kwargs=...)."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    watched = Beside(
        case.cell,
        model=model,
        optimizer=False,
        given={
            "optimizer": optimizer,
            "lr_scheduler": lambda wrapped: torch.optim.lr_scheduler.ReduceLROnPlateau(wrapped, factor=0.5, patience=0),
        },
    )
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(watched.optimizer, factor=0.5, patience=0)
    rates = []
    for index in range(10):
        watched.engine.backward(watched.loss(index), rollouts=2)
        watched.engine.step(lr_kwargs={"metrics": float(index)})
        watched.has(index)
        if index % 2:
            watched.steps()
            plateau.step(float(index))
            rates.append(float(watched.engine.get_lr()[0]) == watched.optimizer.param_groups[0]["lr"])
    return watched.found([all(rates)], [True])


@play.right(STAGES)
def the_rate_is_a_tensor(case):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    watched = Beside(
        case.cell,
        model=model,
        optimizer=False,
        by=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        given={"optimizer": optimizer},
    )
    watched.passes(range(4))
    watched.engine.optimizer.param_groups[0]["lr"].fill_(0.005)
    watched.optimizer.param_groups[0]["lr"] = 0.005
    watched.passes(range(4, 8))
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
