"""What loops do to weights and to an optimizer's state beside stepping: write, swap, merge adapters, reset."""

import copy

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.hard.unforeseen.cells import CELLS, STAGES, Cell, Watched
from tests.hard.unforeseen.oracle import WIDTH, Net, sample
from tests.hard.unforeseen.scenarios import Scenarios

play = Scenarios()
CLIP = 1.0  # some steps are clipped, and others are not

WRITES = {
    "halves": lambda name, one: one.mul_(0.5),
    "clamps": lambda name, one: one.clamp_(-0.05, 0.05) if "head" in name else one,
    "centres": lambda name, one: one.sub_(one.mean()),
    "normalizes": lambda name, one: one.div_(one.norm(dim=-1, keepdim=True)) if "body.weight" in name else one,
    "zeroes": lambda name, one: one.zero_() if "bias" in name else one,
}


def written(weights, write):
    """Write every one of the named weights where it lies."""
    with torch.no_grad():
        for name, one in weights.items():
            write(name, one)


def in_place(watched, write):
    """As a projection does."""
    written(dict(watched.engine.module.named_parameters()), write)


def by_state_dict(watched, write):
    """As a swap of weights does."""
    state = copy.deepcopy(watched.engine.module.state_dict())
    written(state, write)
    watched.engine.module.load_state_dict(state)


def by_engine(watched, write):
    """The same, by DeepSpeed's own way."""
    state = copy.deepcopy(watched.engine.module.state_dict())
    written(state, write)
    watched.engine.load_module_state_dict({"module": state}, strict=True)


def gathered(watched, write):
    """By one rank; the others get it from there."""
    weights = dict(watched.engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(weights.values()), modifier_rank=0):
        written(weights if watched.rank == 0 else {}, write)


def gathered_one_by_one(watched, write):
    """By the other rank."""
    for name, one in watched.engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([one], modifier_rank=1):
            written({name: one} if watched.rank == 1 else {}, write)


def to_masters(watched, write):
    """By DeepSpeed's function for the weights that the optimizer has."""
    for name, one in watched.engine.module.named_parameters():
        value = safe_get_full_fp32_param(one)
        written({name: value}, write)
        safe_set_full_fp32_param(one, value)


class Once:
    """An optimizer whose next step starts from weights that forwards did not see.

    Args:
        oracle: whose optimizer it is.
        weights: which ones, by name.
    """

    def __init__(self, oracle, weights):
        self._oracle, self._weights, self._own = oracle, weights, oracle.optimizer

    def step(self):
        """Take the step, and let the other optimizer take the rest."""
        self._oracle.model.load_state_dict(self._weights)
        self._own.step()
        self._oracle.optimizer = self._own


def _written(case, way):
    """A window, the write, and two windows more."""
    watched = Watched(case.cell, clip=CLIP)
    write = WRITES[case.variant.split()[-1]]
    model = watched.oracle.model
    watched.passes((0, 1))
    way(watched, write)
    before = copy.deepcopy(model.state_dict())
    written(dict(model.named_parameters()), write)
    if way is to_masters:  # forwards see it behind the next step
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        watched.oracle.optimizer = Once(watched.oracle, now)
    elif case.cell.stage:  # forwards see it until then
        watched.oracle.optimizer = Once(watched.oracle, before)
    watched.passes(range(2, 6))
    return watched.found()


WHERE_WHOLE = (in_place, by_state_dict, by_engine)


def _named(ways):
    return [f"{way.__name__} {write}" for way in ways for write in WRITES]


@play.right([Cell(0), Cell(1), Cell(2), Cell(2, offload=True)], _named(WHERE_WHOLE))
def whole_weights_are_written(case):
    """ZeRO 0 in fp32 goes on from them; on ZeRO 1 and 2 the next step is taken from what the optimizer has."""
    return _written(case, next(one for one in WHERE_WHOLE if one.__name__ == case.variant.split()[0]))


PARTED = (gathered, gathered_one_by_one)


@play.right([Cell(3)], _named(PARTED))
def gathered_weights_are_written(case):
    """As on ZeRO 1 and 2."""
    return _written(case, next(one for one in PARTED if one.__name__ == case.variant.split()[0]))


@play.right([Cell(1), Cell(2), Cell(1, offload=True), Cell(2, offload=True)], _named([to_masters]))
def the_optimizers_weights_are_written(case):
    """They are what every step is taken from."""
    return _written(case, to_masters)


# What replaces the tensors that parameters hold, by others of the same values.


def cloned(engine):
    """By copies."""
    for one in engine.module.parameters():
        one.data = one.data.clone()


def swapped_for_an_evaluation(engine):
    """By an average's, and back by the tensors that were there."""
    kept = [one.data for one in engine.module.parameters()]
    for one in engine.module.parameters():
        one.data = 0.9 * one.data
    _evaluated(engine)
    for one, data in zip(engine.module.parameters(), kept, strict=True):
        one.data = data


def swapped_and_backed_up(engine):
    """Written over, and back by copies."""
    kept = [one.data.clone() for one in engine.module.parameters()]
    for one in engine.module.parameters():
        one.data.mul_(0.9)
    _evaluated(engine)
    for one, data in zip(engine.module.parameters(), kept, strict=True):
        one.data = data


def swapped_and_copied_back(engine):
    """Written over, and written again."""
    kept = [one.data.clone() for one in engine.module.parameters()]
    for one in engine.module.parameters():
        one.data.mul_(0.9)
    _evaluated(engine)
    for one, data in zip(engine.module.parameters(), kept, strict=True):
        one.data.copy_(data)


def _evaluated(engine):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(1, WIDTH, device=engine.device), torch.ones(1, device=engine.device))
    engine.train()


def through_another_dtype(engine):
    """To fp64 and back."""
    engine.module.double()
    engine.module.float()


def through_a_vector(engine):
    """By the utilities of torch."""
    vector = parameters_to_vector(engine.module.parameters())
    vector_to_parameters(vector.detach().clone(), engine.module.parameters())


def one_alone(engine):
    """That of one parameter."""
    engine.module.head.bias.data = engine.module.head.bias.data.clone()


SWAPS = (
    cloned,
    swapped_for_an_evaluation,
    swapped_and_backed_up,
    swapped_and_copied_back,
    through_another_dtype,
    through_a_vector,
    one_alone,
)


@play.right(
    [Cell(0), Cell(1), Cell(2), Cell(2, offload=True)],
    [f"{one.__name__} {when}" for one in SWAPS for when in ("between", "inside")],
)
def tensors_are_replaced(case):
    """Between windows, or behind a window's first pass."""
    name, when = case.variant.split()
    watched = Watched(case.cell, clip=CLIP)
    done = 2 if when == "between" else 3
    watched.passes(range(done))
    next(one for one in SWAPS if one.__name__ == name)(watched.engine)
    watched.passes(range(done, 8))
    return watched.found()


@play.refused([Cell(0), Cell(1), Cell(2)], "WindowError: ")
def parameters_are_replaced(case):
    """By load_state_dict(assign=True), which no optimizer hears of."""
    watched = Watched(case.cell)
    watched.passes(range(2))
    state = {name: one.clone() for name, one in watched.engine.module.state_dict().items()}
    watched.engine.module.load_state_dict(state, assign=True)
    watched.passes(range(2, 4))


def adapted(model):
    """An optimizer with two states."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, lr=0.02, eps=1e-3, betas=(0.8, 0.9), weight_decay=0.01)


def _reset(optimizer, what):
    inner = getattr(optimizer, "optimizer", optimizer)
    if what == "cleared":
        inner.state.clear()
        return
    for state in inner.state.values():
        for name, value in state.items():
            if value.dim() and (what == "zeroed" or name == "exp_avg_sq"):
                value.zero_()


@play.right(CELLS, ["zeroed", "squares", "cleared"], bound=1e-5)
def an_optimizers_state_is_reset(case):
    """Between windows, as ReLoRA does: all of it, that of the squares alone, or cleared."""
    model = Net()
    watched = Watched(
        case.cell, model=model, clip=CLIP, by=adapted, optimizer=False, given={"optimizer": adapted(model)}
    )
    watched.passes(range(2))
    _reset(watched.engine.optimizer, case.variant)
    _reset(watched.oracle.optimizer, case.variant)
    watched.passes(range(2, 8))
    return watched.found()


class Adapter(Net):
    """A frozen body with an adapter, which is merged into it and taken out again.

    Attributes:
        merged: whether it is in there.
    """

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.merged = False

    def predicted(self, x):
        """One number a sample."""
        hidden = self.body(x) if self.merged else self.body(x) + self.up(self.down(x))
        return self.head(torch.tanh(hidden)).squeeze(-1)

    def add(self, sign):
        """Add the adapter's product to the body's weight, or take it away."""
        with torch.no_grad():
            self.body.weight.add_(sign * self.up.weight @ self.down.weight)


def _trained_alone(model):
    return [one for one in model.parameters() if one.requires_grad]


def descent(model):
    """Plain descent of what is trained."""
    return torch.optim.SGD(_trained_alone(model), lr=0.1)


@play.right(CELLS, ["evaluated between", "evaluated inside", "for good"])
def an_adapter_is_merged(case):
    """For an evaluation, or for good: the base is frozen, so that no optimizer has it."""
    model = Adapter()
    given = {"model_parameters": _trained_alone(model)}
    watched = Watched(case.cell, model=model, by=descent, clip=CLIP, given=given)

    def add(sign):
        whole = deepspeed.zero.GatheredParameters(
            list(model.parameters()), modifier_rank=0, enabled=case.cell.stage == 3
        )
        with whole:
            model.add(sign)

    done = 3 if case.variant.endswith("inside") else 2
    watched.passes(range(done))
    add(1)
    if case.variant == "for good":
        watched.oracle.model.add(1)
    else:
        model.merged = True
        _evaluated(watched.engine)
        model.merged = False
        add(-1)
    watched.passes(range(done, 8))
    return watched.found()


PENALTY = 0.01


@play.right(STAGES[:3], ["loss", "functional"])
def weights_are_read_by_the_loss(case):
    """A penalty on all of them, outside of the model's forward; or a forward by other weights, made from them."""
    watched = Watched(case.cell, clip=CLIP)

    def loss(run, model, x, y):
        if case.variant == "loss":
            return run(x, y) + PENALTY * sum(one.pow(2).sum() for one in model.parameters())
        return torch.func.functional_call(model, {name: 1.1 * one for name, one in model.named_parameters()}, (x, y))

    for index in range(8):
        watched.engine.backward(loss(watched.engine, watched.engine.module, *watched.inputs(index)), rollouts=2)
        watched.engine.step()
        for rank in range(watched.ranks):
            x, y = (one.double() for one in sample(rank, index, 2))
            watched.oracle.add(2, lambda model, x=x, y=y: loss(model, model, x, y))
        watched.oracle.end_pass(2 * watched.ranks)
    return watched.found()


@pytest.mark.parametrize("case", play.cases("right"), ids=str)
def test_every_rank_steps_as_the_oracle_does(outcomes, case):
    outcomes.assert_right(case)


@pytest.mark.parametrize("case", play.cases("refused"), ids=str)
def test_every_rank_refuses(outcomes, case):
    outcomes.assert_refused(case)
