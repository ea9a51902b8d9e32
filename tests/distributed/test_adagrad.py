"""torch's Adagrad is stepped as it was given, though DeepSpeed builds another one on ZeRO 1 to 3."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import perceptron
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_loop_shapes import extended, loss_of, micro_batches, weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
CELLS = [(stage, kind) for stage in STAGES for kind in ("fp32", "offload") if stage or kind == "fp32"]


class Halved(torch.optim.Adagrad):
    """A class of one's own, whose steps are half as long."""

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= 2
        result = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        return result


def groups(model):
    matrices, vectors = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]


def fading(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def given(model, kind):
    """How a caller gives the optimizer and its scheduler."""
    if kind == "made by functions":
        return {"optimizer": lambda ps: Halved(groups(model), lr=0.1), "lr_scheduler": fading}
    optimizer = (Halved if kind == "a class of its own" else torch.optim.Adagrad)(groups(model), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": fading(optimizer)}


KINDS = ["torch's", "a class of its own", "made by functions"]


def trained(engine):
    """The rates behind each window."""
    rates = []
    for window in micro_batches(dist.get_rank()):
        for seed, rollouts in window:
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
            engine.step()
        rates.append(engine.get_lr())
    return rates


@at_length_on_two_ranks
def adagrad(folder):
    """By cell: the rates, the weights after two windows, and those of a run that goes on from a checkpoint."""
    results = {}
    for stage, kind in CELLS:
        for way in KINDS:
            runs = []
            for resumes in (False, True):
                model = perceptron()
                engine, *_ = ds_parity.initialize(model=model, config=extended(stage, kind), **given(model, way))
                if resumes:
                    engine.load_checkpoint(folder, tag=f"{stage}-{kind}-{way}")
                rates = trained(engine)
                if not resumes:
                    engine.save_checkpoint(folder, tag=f"{stage}-{kind}-{way}")
                runs.append([rates, weights(engine)])
                engine.destroy()
            results[f"{stage} {kind} {way}"] = runs
    return results


@pytest.mark.parametrize("way", KINDS)
@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_it_follows_its_scheduler_its_groups_and_its_class(two_ranks_at_length, stage, kind, way):
    results = two_ranks_at_length.of(adagrad)
    for number, (rates, own) in enumerate(results[f"{stage} {kind} {way}"]):
        first = 2 * number
        assert rates == [pytest.approx([0.1 / step, 0.02 / step]) for step in (first + 2, first + 3)]
        right = results[f"0 fp32 {way}"][number][1]
        for one, other in zip(own, right, strict=True):
            assert one == pytest.approx(other, abs=2e-6)


def test_a_class_of_its_own_makes_a_difference(two_ranks_at_length):
    results = two_ranks_at_length.of(adagrad)
    assert results["0 fp32 torch's"][0][1] != results["0 fp32 a class of its own"][0][1]
