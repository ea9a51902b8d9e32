"""Parameters without a dimension, or that are not contiguous, are trained as an oracle in float64 trains them."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init

import ds_parity
from ds_parity.engine.internals import broadcast
from ds_parity.engine.internals.broadcast import any_shape_is_gathered, any_shape_is_sent
from tests.distributed.beside_an_oracle import WINDOWS, distance
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import from_all
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks

BF16 = {"bf16": {"enabled": True}}
# Weights of up to 2 in bf16 are rounded by up to 2 ** -8 at each of the steps, and in the beginning.
PRECISIONS = {
    "fp32": ({}, 0.0, 1e-6),
    "bf16": (BF16, 0.0, (WINDOWS + 1) * 2**-8),
    "fp32 clipped": ({}, 0.1, 1e-6),
    "fp32 below the limit": ({}, 1000.0, 1e-6),
}


class Odd(torch.nn.Module):
    """An image through channels_last convolutions, a transposed weight, an expanded bias, and a temperature.

    Three weights are contiguous for torch, and their last stride is not 1: of a convolution of 1 x 1, a column, and one
    element.
    """

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)  # all ranks begin with the weights of the first one
        self.patches = torch.nn.Conv2d(3, 4, 2, 2).to(memory_format=torch.channels_last)
        self.mix = torch.nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
        self.column = torch.nn.Parameter(torch.randn(1, 4).t())
        self.single = torch.nn.Parameter(torch.rand(4)[::2][:1])
        self.head = torch.nn.Linear(4, 3)
        self.head.weight = torch.nn.Parameter(torch.randn(4, 3).t())
        self.head.bias = torch.nn.Parameter(torch.randn(1).expand(3))
        self.temperature = torch.nn.Parameter(torch.rand(()) + 1)
        assert not self.patches.weight.is_contiguous()
        for one in (self.mix.weight, self.column, self.single):
            assert one.is_contiguous()
            assert one.stride(-1) > 1

    def forward(self, image):
        """Return one number."""
        found = (
            self.mix(self.patches(image.to(self.patches.weight.dtype))).mean((2, 3))
            * self.column[:, 0]
            * (1 + self.single)
        )
        return (self.head(found) * self.temperature).float().pow(2).mean()


def image(seed):
    """A sample of a pass and rank."""
    return torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


@on_two_ranks
def odd_shapes(folder):
    """By stage and precision; and what was replaced in DeepSpeed while engines were built is back."""
    own = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param
    found = {
        f"{stage}-{name}": from_all(distance(stage, keys, Odd, image, clip=clip))
        for stage in STAGES
        for name, (keys, clip, _) in PRECISIONS.items()
    }
    left = (DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param) == own
    return {"found": found, "left": left}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_those_of_an_oracle(two_ranks, stage, precision):
    found = two_ranks.of(odd_shapes)["found"][f"{stage}-{precision}"]
    assert max(found) <= PRECISIONS[precision][2]


def test_nothing_of_deepspeed_stays_replaced(two_ranks):
    assert two_ranks.of(odd_shapes)["left"]


def _built(stage, seed):
    """An engine, whose weights are those of a seed on every rank."""
    keys = config(stage, "fp32", 2, "AdamW")
    keys["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return ds_parity.initialize(model=Odd(seed), config=keys)[0]


@on_two_ranks
def odd_weights_alone(folder):
    """By stage: a rank's weights that were saved, those that were loaded, and those in the file of 16 bits."""
    found = {}
    for stage in STAGES:
        saved, other = _built(stage, 0), _built(stage, 1)
        saved.save_checkpoint(f"{folder}/alone-{stage}", tag="one")
        other.load_checkpoint(f"{folder}/alone-{stage}", tag="one", load_optimizer_states=False)
        saved.save_16bit_model(f"{folder}/alone-{stage}", "whole.pt")
        dist.barrier()
        whole = torch.load(f"{folder}/alone-{stage}/whole.pt")
        for one in (other, saved):
            with GatheredParameters(list(one.module.parameters()), enabled=stage == 3):
                loaded = {name: weight.detach().clone() for name, weight in one.module.named_parameters()}
            same = all(loaded[name].shape == it.shape and loaded[name].equal(it) for name, it in whole.items())
            found.setdefault(str(stage), []).append(same and whole.keys() == loaded.keys())
    return from_all(found)


def test_weights_alone_are_loaded_and_saved(two_ranks, stage):
    for found in two_ranks.of(odd_weights_alone):
        assert found[stage] == [True, True]


def test_what_another_context_has_gathered_stays_a_number(monkeypatch):
    weight = torch.nn.Parameter(torch.tensor(0.5))

    class Gathered:
        enabled, src_rank, params = True, 0, (weight,)

        def __exit__(self, *exception):
            assert weight.shape == (1,)

    monkeypatch.setattr(broadcast, "GatheredParameters", Gathered)
    with any_shape_is_gathered():
        Gathered().__exit__(None, None, None)
    assert weight.shape == ()


def test_nothing_stays_replaced_where_an_engine_is_not_built():
    own = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param
    with pytest.raises(ZeroDivisionError), any_shape_is_sent():
        raise ZeroDivisionError
    assert (DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param) == own
