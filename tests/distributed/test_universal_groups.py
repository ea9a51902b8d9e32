"""Universal checkpoints of several parameter groups: each keeps its own values, whatever they are, and no other's."""

from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.continuing import converted
from tests.distributed.engines import from_all
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class _Scaled(torch.optim.AdamW):
    """Multiplies the learning rate of a group by its `lr_scale`, where it has one."""

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * float(group.get("lr_scale", 1.0))
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


# By name: what each of the two groups has.
GROUPS = {
    "numbers": ({"lr": 0.03}, {"lr": 0.003}),
    "tensors": ({"lr": torch.tensor(0.03)}, {"lr": torch.tensor(0.003)}),
    "numpy's": ({"lr": np.float32(0.03)}, {"lr": np.float32(0.003)}),
    "a name of the first": ({"lr": 0.03, "lr_scale": 0.1}, {"lr": 0.03}),
    "a name of the second": ({"lr": 0.03}, {"lr": 0.03, "lr_scale": 0.1}),
    "a kind that is not kept": ({"lr": 0.03, "lr_scale": Decimal("0.1")}, {"lr": 0.03, "lr_scale": 0.5}),
}
STAGES = (1, 3)


def _engine(stage, name, seed, **keys):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    groups = [
        {"params": list(layer.parameters()), **{k: v.clone() if torch.is_tensor(v) else v for k, v in own.items()}}
        for layer, own in zip((model[0], model[2]), GROUPS[name], strict=True)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return ds_parity.initialize(model=model, optimizer=_Scaled(groups, foreach=False), config=config)[0]


def _steps(engine, seeds):
    for seed in seeds:
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(engine.device)
        engine.backward(engine(x).pow(2).mean(), rollouts=1)
        engine.step()
    return weights.vector(engine.module).tolist()


def _values(engine):
    names = ("lr", "lr_scale")
    return [{name: float(group[name]) for name in names if name in group} for group in engine.optimizer.param_groups]


@at_length_on_two_ranks
def universal_groups(folder):
    """By stage and case: values of groups and weights of the run that goes on, and of one that has loaded it."""
    results = {}
    for stage in STAGES:
        for name in GROUPS:
            path = f"{folder}/{stage}-{name}"
            engine = _engine(stage, name, 0)
            _steps(engine, range(3))
            engine.save_checkpoint(path)
            assert converted(path, 3) in (None, "nothing was raised")
            goes_on = [_values(engine), _steps(engine, range(3, 6))]
            engine = _engine(stage, name, 1, checkpoint={"load_universal": True})
            engine.load_checkpoint(path)
            values = _values(engine)
            # A scheduler fills a tensor: no group may have that of another one.
            shared = engine.optimizer.param_groups[0]["lr"] is engine.optimizer.param_groups[1]["lr"]
            loaded = [values, _steps(engine, range(3, 6))]
            dist.barrier()
            results[f"{stage} {name}"] = from_all([goes_on, loaded, name == "tensors" and shared])
    return results


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("stage", STAGES)
def test_each_group_of_a_universal_checkpoint_has_its_own_values(two_ranks_at_length, stage, name):
    for goes_on, loaded, shared in two_ranks_at_length.of(universal_groups)[f"{stage} {name}"]:
        assert loaded[0] == goes_on[0]
        assert loaded[1] == goes_on[1]
        assert not shared
