"""Parameters without a dimension, or that are not contiguous, are trained as an oracle in float64 trains them."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init

import ds_parity
from ds_parity.engine.internals.broadcast import any_shape_is_sent
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

RATE, PASSES, WINDOWS = 0.1, 4, 2
BF16 = {"bf16": {"enabled": True}}
# Weights of up to 2 in bf16 are rounded by up to 2 ** -8 at each of the steps, and in the beginning.
PRECISIONS = {"fp32": ({}, 1e-6), "bf16": (BF16, (WINDOWS + 1) * 2**-8)}


class Odd(torch.nn.Module):
    """An image through a channels_last convolution, a transposed weight, an expanded bias, and a temperature."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)  # all ranks begin with the weights of the first one
        self.patches = torch.nn.Conv2d(3, 4, 2, 2).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(4, 3)
        self.head.weight = torch.nn.Parameter(torch.randn(4, 3).t())
        self.head.bias = torch.nn.Parameter(torch.randn(1).expand(3))
        self.temperature = torch.nn.Parameter(torch.rand(()) + 1)
        assert not self.patches.weight.is_contiguous()

    def forward(self, image):
        """Return one number."""
        found = self.patches(image.to(self.patches.weight.dtype)).mean((2, 3))
        return (self.head(found) * self.temperature).float().pow(2).mean()


def image(seed):
    """A sample of a pass and rank."""
    return torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def oracle():
    """The weights after all windows, in float64 on one process."""
    model = Odd(0).double()
    for window in range(WINDOWS):
        loss = sum(model(image(PASSES * window + number).double()) for number in range(PASSES)) / PASSES
        for one, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            one.data.sub_(RATE * gradient)
    return weights.vector(model)


def distance(stage, keys):
    """How far an engine's weights are from the oracle's at most."""
    made = {**config(stage, passes=PASSES), **keys, "gradient_clipping": 0.0, "scheduler": None}
    made["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    del made["scheduler"]
    model = Odd(dist.get_rank())
    engine, *_ = ds_parity.initialize(model=model, model_parameters=model.parameters(), config=made)
    for number in range(WINDOWS * PASSES // 2):
        loss = engine(image(2 * number + dist.get_rank()).to(engine.device))
        engine.backward(loss, rollouts=1)
        engine.step()
    assert engine.last_step.step == WINDOWS
    found = (weights.vector(engine.module).double().cpu() - oracle().double()).abs().max().item()
    engine.destroy()
    return found


@on_two_ranks
def odd_shapes(folder):
    """By stage and precision; and what was replaced in DeepSpeed while engines were built is back."""
    own = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param
    found = {
        f"{stage}-{name}": from_all(distance(stage, keys)) for stage in STAGES for name, (keys, _) in PRECISIONS.items()
    }
    left = (DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param) == own
    return {"found": found, "left": left}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_those_of_an_oracle(two_ranks, stage, precision):
    found = two_ranks.of(odd_shapes)["found"][f"{stage}-{precision}"]
    assert max(found) <= PRECISIONS[precision][1]


def test_nothing_of_deepspeed_stays_replaced(two_ranks):
    assert two_ranks.of(odd_shapes)["left"]


def test_nothing_stays_replaced_where_an_engine_is_not_built():
    own = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param
    with pytest.raises(ZeroDivisionError), any_shape_is_sent():
        raise ZeroDivisionError
    assert (DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param) == own
