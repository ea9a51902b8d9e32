"""Classes of torch's Adagrad with more than it has: DeepSpeed builds another one, without that, on ZeRO 1 to 3."""

import pytest
import torch

from ds_parity.engine.internals.adagrad import refuse_more
from ds_parity.errors import ConfigError


class WithStates(torch.optim.Adagrad):
    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mine"] = torch.zeros_like(p)


class WithDefaults(torch.optim.Adagrad):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.defaults["mine"] = 1


class Plain(torch.optim.Adagrad):
    pass


@pytest.mark.parametrize("kind", [WithStates, WithDefaults])
def test_what_would_be_lost_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=rf"the optimizer is {kind.__name__}.*\(mine\).*stage 0"):
        refuse_more(kind([torch.zeros(2, requires_grad=True)]))


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, Plain])
def test_one_with_nothing_more_is_taken(kind):
    refuse_more(kind([torch.zeros(2, requires_grad=True)]))
