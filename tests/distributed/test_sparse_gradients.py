"""`torch.nn.Embedding(sparse=True)` on ZeRO 0 in fp32: what clipping does to a sparse gradient, beside fp64."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import ds_parity
from ds_parity.engine.internals.installed import installed
from ds_parity.parity.running import weights
from tests.distributed.engines import refusal
from tests.distributed.sets import on_two_ranks
from tests.older_refusals import is_older

pytestmark = pytest.mark.ranks

RATE, TARGET, RANKS = 0.1, 8, 2
# Rollouts of both ranks by pass; windows of 3, 2, 3 and 2 passes, of 8, 9, 8 and 8 rollouts (the target moves by what a
# window has too many). The second overshoots, and every pass has been divided by an estimate of its total.
PASSES = [(1, 2), (2, 1), (1, 1), (1, 3), (2, 3), (3, 1), (1, 1), (1, 1), (2, 2), (3, 1)]
# 1e9 is a limit that no gradient reaches; what clips hardest leaves a two-hundredth.
LIMITS = (0.0, 1e9, 0.5, 0.02)
MODELS = ("sparse", "both", "alone")


class Words(torch.nn.Module):
    """Embeddings of which all, some or none have sparse gradients; its forward is its loss."""

    def __init__(self, model, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(20, 4, sparse=sparse)
        self.more = torch.nn.Embedding(20, 4, sparse=sparse and model == "both")
        self.head = torch.nn.Linear(4, 1)
        for one in (self.more, self.head) if model == "alone" else ():
            one.requires_grad_(False)

    def forward(self, ids, labels):
        """Mean of squares over ids of shape (rollouts, 3), which contain equal ones."""
        return (self.head((self.words(ids) + self.more(ids)).mean(1)).squeeze(-1) - labels).pow(2).mean()


def drawn(rank, index):
    """What a rank has in a pass: ids of shape (rollouts, 3) below 5, and labels of shape (rollouts,)."""
    generator, size = torch.Generator().manual_seed(10 * index + rank), PASSES[index][rank]
    return torch.randint(5, (size, 3), generator=generator), 9 * torch.randn(size, generator=generator)


def expected(model, clip):
    """Weights and norms of the same passes in fp64, with dense gradients, on one process."""
    right = Words(model, sparse=False).double()
    trained = [one for one in right.parameters() if one.requires_grad]
    norms, open_passes, count, closes_at = [], [], 0, TARGET
    for index, sizes in enumerate(PASSES):
        open_passes.append(index)
        count += sum(sizes)
        if count >= closes_at:
            norms.append(_stepped(right, trained, open_passes, clip))
            open_passes, closes_at = [], closes_at + TARGET
    return {"weights": torch.cat([one.detach().flatten() for one in right.parameters()]), "norms": norms}


def _stepped(right, trained, passes, clip):
    total = sum(sum(PASSES[index]) for index in passes)
    losses = [
        len(labels) * right(ids, labels.double()) / total
        for ids, labels in (drawn(rank, index) for index in passes for rank in range(RANKS))
    ]
    gradients = torch.autograd.grad(sum(losses), trained)
    norm = float(sum(one.pow(2).sum() for one in gradients)) ** 0.5
    with torch.no_grad():
        for one, gradient in zip(trained, gradients, strict=True):
            one.sub_(RATE * gradient * (min(1.0, clip / norm) if clip else 1.0))
    return norm


@on_two_ranks
def sparse_gradients(folder):
    """By model and limit: the norm of every step, and how far weights are from the oracle's at the end."""
    return {f"{model} {clip}": _trained(model, clip) for model in MODELS for clip in LIMITS}


def _configured(clip, **more):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": TARGET,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 0},
        **more,
    }


def _trained(kind, clip):
    model, rank, device = Words(kind), dist.get_rank(), get_accelerator().current_device_name()
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = ds_parity.initialize(model=model, model_parameters=trained, config=_configured(clip))
    norms = []
    for index, sizes in enumerate(PASSES):
        ids, labels = (one.to(device) for one in drawn(rank, index))
        engine.backward(engine(ids, labels), rollouts=sizes[rank])
        engine.step()
        if engine.window.passes == 0:
            norms.append(engine.last_step.grad_norm)
    right = expected(kind, clip)
    got = weights.vector(engine.module).double().cpu()
    return {"norms": norms, "right": right["norms"], "apart": float((got - right["weights"]).abs().max())}


@pytest.mark.parametrize("clip", LIMITS)
@pytest.mark.parametrize("model", MODELS)
def test_sparse_gradients_are_clipped_as_dense_ones_are(two_ranks, model, clip):
    """Windows of several passes, with equal ids in them, and totals that the division did not know."""
    result = two_ranks.of(sparse_gradients)[f"{model} {clip}"]
    assert len(result["right"]) == 4
    assert all(norm > 0.5 for norm in result["right"]), "every limit but the greatest must clip"
    assert result["norms"] == (pytest.approx(result["right"], rel=1e-5) if clip else [None] * 4)
    # fp32 rounds a weight of about 1 by 6e-8, and the few steps are of 0.1 times such numbers.
    assert result["apart"] <= 1e-6


@on_two_ranks
def compressed(folder):
    """What DeepSpeed's own key for sparse reductions is answered with."""
    try:
        return refusal(
            lambda: ds_parity.initialize(model=Words("sparse"), config=_configured(1.0, sparse_gradients=True))
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_key_sparse_gradients_is_refused(two_ranks):
    """DeepSpeed 0.19.8 has taken it back, and says so; releases before it lose rows of gradients."""
    before = is_older(installed())
    assert ("rows of a gradient that add up to 0 are lost" if before else "Sparse compression") in two_ranks.of(
        compressed
    )
