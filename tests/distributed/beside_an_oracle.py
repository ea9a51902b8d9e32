"""A model trained by an engine, and in float64 on one process: how far their weights are from each other."""

import torch
import torch.distributed as dist

import ds_parity
from ds_parity.parity.running import weights
from tests.distributed.cells import config

RATE, PASSES, WINDOWS = 0.1, 4, 2


def distance(stage, keys, model, sample, *, zero=None, meanwhile=None, clip=0.0):
    """The greatest difference of a weight after WINDOWS steps of SGD.

    Args:
        stage: of ZeRO.
        keys: of the configuration.
        model: given a rank, returns a module whose forward is its loss; the weights of rank 0 are trained.
        sample: given a seed, returns what the forward takes.
        zero: options of ZeRO.
        meanwhile: called with the engine before its first pass.
        clip: the greatest norm of a gradient; 0 for any.
    """
    made = {**config(stage, passes=PASSES), **keys, "gradient_clipping": clip}
    made["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    made["zero_optimization"] |= zero or {}
    del made["scheduler"]
    trained = model(dist.get_rank())
    engine, *_ = ds_parity.initialize(model=trained, model_parameters=trained.parameters(), config=made)
    if meanwhile is not None:
        meanwhile(engine)
    for number in range(WINDOWS * PASSES // 2):
        engine.backward(engine(sample(2 * number + dist.get_rank()).to(engine.device)), rollouts=1)
        engine.step()
    assert engine.last_step.step == WINDOWS
    expected = _oracle(model(0).double(), sample, clip)
    found = (weights.vector(engine.module).double().cpu() - expected.double()).abs().max().item()
    engine.destroy()
    return found


def _oracle(model, sample, clip):
    for window in range(WINDOWS):
        loss = sum(model(sample(PASSES * window + number).double()) for number in range(PASSES)) / PASSES
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.nn.utils.get_total_norm(gradients)
        share = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            one.data.sub_(RATE * share * gradient)
    return weights.vector(model)
