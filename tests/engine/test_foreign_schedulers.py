"""Which schedulers move the engine's optimizer, and which another one."""

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, ReduceLROnPlateau

from ds_parity.engine.foreign_parameters import refuse_foreign_scheduler
from ds_parity.errors import ConfigError

MODEL = torch.nn.Linear(2, 2)


def sgd(parameters=None):
    return torch.optim.SGD(parameters or MODEL.parameters(), lr=0.1)


class Wrapper:
    """As frameworks wrap an optimizer: its groups are copies, and what is set on them is set on the one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return [dict(group) for group in self.optimizer.param_groups]


class Inner:
    """One that calls it otherwise."""

    def __init__(self, optimizer):
        self.inner = Wrapper(optimizer)
        self.param_groups = self.inner.param_groups


class Moving:
    """A scheduler as somebody writes one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


OWN = sgd()
RIGHT = {
    "none": None,
    "a function": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "torch's": ExponentialLR(OWN, 0.5),
    "chained": ChainedScheduler([ExponentialLR(OWN, 0.5)]),
    "on a plateau": ReduceLROnPlateau(OWN),
    "one's own": Moving(OWN),
    "over a wrapper": Moving(Wrapper(OWN)),
    "over a wrapper of a wrapper": Moving(Wrapper(Wrapper(OWN))),
    "over a wrapper with a name of its own": Moving(Inner(OWN)),
    "over another class with the same groups": Moving(torch.optim.Adam(OWN.param_groups)),
    "without an optimizer": object(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_scheduler_of_the_engines_optimizer_passes(name):
    refuse_foreign_scheduler({"lr_scheduler": RIGHT[name], "optimizer": OWN})


def test_a_scheduler_over_what_a_wrapper_holds_passes():
    refuse_foreign_scheduler({"lr_scheduler": ExponentialLR(OWN, 0.5), "optimizer": Wrapper(OWN)})


def test_beside_a_function_that_makes_the_optimizer_nothing_is_known():
    refuse_foreign_scheduler({"lr_scheduler": ExponentialLR(OWN, 0.5), "optimizer": lambda parameters: OWN})


@pytest.mark.parametrize("optimizer", [OWN, None])
@pytest.mark.parametrize("make", [lambda it: ExponentialLR(it, 0.5), lambda it: LambdaLR(it, float), Moving])
def test_a_scheduler_of_another_optimizer_is_refused(make, optimizer):
    with pytest.raises(ConfigError, match="over another optimizer"):
        refuse_foreign_scheduler({"lr_scheduler": make(sgd()), "optimizer": optimizer})
