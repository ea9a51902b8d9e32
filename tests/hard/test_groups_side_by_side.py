"""Groups of ranks that build engines side by side, of which one gives a function that its ranks do not make alike."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import config
from tests.distributed.engines import refusal
from tests.distributed.test_model_parts import Mpu

pytestmark = pytest.mark.slow
LIMIT = 3.0  # seconds that an engine waits for other ranks


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def made(way, parameters, apart):
    if way == "raises" and apart:
        raise ds_parity.WindowError("no optimizer today")
    return torch.optim.SGD(parameters[::-1] if way == "another order" and apart else parameters, lr=0.1)


def built(rank, way, stage):
    """What each of four ranks is told: two and two step together, and the first two of them give functions."""
    net, mpu = model(), Mpu()
    parameters = list(net.parameters())
    given = made("alike", parameters, apart=False)
    if rank % 2 == 0:
        given = lambda _: made(way, parameters, apart=rank == 2)  # noqa: E731
    extended = config(stage, passes=2, exchange_timeout=LIMIT)
    del extended["scheduler"], extended["optimizer"]

    def trains():
        engine = ds_parity.initialize(model=net, optimizer=given, config=extended, mpu=mpu)[0]
        engine.backward(engine(torch.ones(2, 4)).square().mean(), rollouts=1)
        engine.step()
        return dist.get_world_size()

    return refusal(trains)


SAID = {
    "alike": ["nothing was raised"] * 2,
    "another order": ["RankDesyncError: ranks differ in the place of "] * 2,
    "raises": ["RankDesyncError: this rank stops because others did: rank 2 raised", "WindowError: no optimizer today"],
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", SAID)
def test_what_a_function_makes_is_compared_within_its_group(forks, way, stage):
    outcomes = forks.run(built, 4, 90, way=way, stage=stage)
    assert [one.how for one in outcomes] == ["returned"] * 4, outcomes
    for one, said in zip(outcomes[::2], SAID[way], strict=True):
        assert one.value.startswith(said), outcomes
    # The others build an engine of their own, beside which these have ended.
    others = "nothing was raised" if way == "alike" else "RankDesyncError"
    assert all(one.value.startswith(others) for one in outcomes[1::2]), outcomes
