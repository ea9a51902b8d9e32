"""Loops of other shapes than the usual one take the same steps, or are refused on every rank."""

from itertools import product

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

import ds_parity
from tests.distributed.cells import STAGES
from tests.distributed.engines import from_all, perceptron, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks
from tests.older_refusals import may_run

pytestmark = pytest.mark.ranks

# Rollouts by window, pass and rank: windows of three passes and ten rollouts.
WINDOWS = (((2, 1), (1, 2), (3, 1)), ((1, 1), (4, 2), (1, 1)))
TARGET, RATE = 10, 0.5

# What an optimizer wrapper of its own, or buffers of its own, stand behind.
KINDS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp32 at once": {
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "offload": {},
    "no contiguous gradients": {},
    "overlap": {},
}


def extended(stage, kind="fp32"):
    zero = {"stage": stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if kind == "offload" else {}
    zero |= {"contiguous_gradients": False} if kind == "no contiguous gradients" else {}
    zero |= {"overlap_comm": True} if kind == "overlap" else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": TARGET,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **KINDS[kind],
    }


CELLS = [
    (stage, kind)
    for stage, kind in product(STAGES, KINDS)
    if not (kind == "fp32 at once" and stage != 1)
    and not (stage == 0 and kind not in ("fp32", "bf16"))
    and not (stage == 3 and kind == "no contiguous gradients")
    and may_run(extended(stage, kind))
]


def engine_of(stage, kind="fp32", model=None):
    """An engine, and the optimizer that its caller has made."""
    model = perceptron() if model is None else model
    client = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = ds_parity.initialize(
        model=model, model_parameters=model.parameters(), optimizer=client, config=extended(stage, kind)
    )
    return engine, client


def sample(seed, dtype=torch.float32):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return x.to(get_accelerator().current_device_name(), dtype)


def micro_batches(rank):
    """Of one rank, window by window: seed and rollouts of each pass."""
    for window, passes in enumerate(WINDOWS):
        yield [(100 * window + 10 * number + rank, counts[rank]) for number, counts in enumerate(passes)]


def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().double().cpu().flatten().tolist() for p in engine.module.parameters()]


def dtype_of(engine):
    return next(engine.module.parameters()).dtype


def loss_of(call, engine, seed):
    return call(sample(seed, dtype_of(engine))).float().pow(2).mean()


def usual(engine, client, window):
    for seed, rollouts in window:
        engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
        engine.step()


def past_the_engine(engine, client, window):
    """engine.module(x) in place of engine(x)."""
    for seed, rollouts in window:
        engine.backward(loss_of(engine.module, engine, seed), rollouts=rollouts)
        engine.step()


def ahead(engine, client, window):
    """All forwards of a window, then its backwards."""
    losses = [loss_of(engine, engine, seed) for seed, _ in window]
    for loss, (_, rollouts) in zip(losses, window, strict=True):
        engine.backward(loss, rollouts=rollouts)
        engine.step()


def ahead_past_the_engine(engine, client, window):
    losses = [loss_of(engine.module, engine, seed) for seed, _ in window]
    for loss, (_, rollouts) in zip(losses, window, strict=True):
        engine.backward(loss, rollouts=rollouts)
        engine.step()


def evaluating_in_between(engine, client, window):
    for seed, rollouts in window:
        loss = loss_of(engine, engine, seed)
        with torch.no_grad():
            engine(sample(7, dtype_of(engine)))
        engine.backward(loss, rollouts=rollouts)
        with torch.no_grad():
            engine.module(sample(7, dtype_of(engine)))
        engine.step()


def of_shape_one(engine, client, window):
    """A loss of one element, but of one dimension."""
    for seed, rollouts in window:
        engine.backward(loss_of(engine, engine, seed).reshape(1), rollouts=rollouts)
        engine.step()


def clearing(engine, client, window):
    """zero_grad() before each pass, as loops have it that were written for torch, and before each step."""
    for seed, rollouts in window:
        for owner in (engine.optimizer, client, engine):
            owner.zero_grad()
        engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
        for owner in (engine.optimizer, client, engine):
            owner.zero_grad()
        engine.step()


SHAPES = {
    "past the engine": past_the_engine,
    "ahead": ahead,
    "ahead, past the engine": ahead_past_the_engine,
    "evaluating in between": evaluating_in_between,
    "a loss of shape (1,)": of_shape_one,
    "zero_grad()": clearing,
}
# Where gradients lie in buffers of their own these differ; the others are as in fp32.
IN_EVERY_CELL = ("ahead, past the engine", "zero_grad()")


def shapes(kind):
    return SHAPES if kind == "fp32" else IN_EVERY_CELL


def run(stage, kind, loop):
    engine, client = engine_of(stage, kind)
    for window in micro_batches(dist.get_rank()):
        loop(engine, client, window)
    last = engine.last_step
    results = {"weights": weights(engine), "loss": last.loss, "steps": last.step, "rollouts": last.rollouts}
    engine.destroy()
    return results


def oracle():
    """The same steps in float64 on one process, the sum of weight times gradient over the sum of weights."""
    model = perceptron().double()
    for window in zip(*(list(micro_batches(rank)) for rank in range(2)), strict=True):
        parts = [one for own in window for one in own]
        total = sum(rollouts for _, rollouts in parts)
        losses = [rollouts * model(sample(seed, torch.float64).cpu()).pow(2).mean() for seed, rollouts in parts]
        gradients = torch.autograd.grad(sum(losses) / total, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
    return [p.detach().flatten().tolist() for p in model.parameters()]


def of_other_shapes(cells):
    """By cell and shape: the weights, and the last step's loss; the usual loop and the oracle beside them."""
    results = {"oracle": oracle()}
    for stage, kind in cells:
        cell = {"usual": run(stage, kind, usual)}
        for name in shapes(kind):
            cell[name] = run(stage, kind, SHAPES[name])
        results[f"{stage} {kind}"] = cell
    return results


OFTEN = [cell for cell in CELLS if cell[1] in ("fp32", "bf16")]
SELDOM = [cell for cell in CELLS if cell not in OFTEN]


@on_two_ranks
def loops_of_other_shapes(folder):
    return of_other_shapes(OFTEN)


@at_length_on_two_ranks
def loops_of_other_shapes_at_length(folder):
    return of_other_shapes(SELDOM)


@pytest.mark.parametrize("stage", STAGES)
def test_the_usual_loop_steps_as_the_oracle_does(two_ranks, stage):
    results = two_ranks.of(loops_of_other_shapes)
    for right, own in zip(results["oracle"], results[f"{stage} fp32"]["usual"]["weights"], strict=True):
        assert own == pytest.approx(right, abs=2e-7)


@pytest.mark.parametrize(("stage", "kind", "shape"), [(*cell, shape) for cell in OFTEN for shape in shapes(cell[1])])
def test_a_loop_of_another_shape_takes_the_same_steps_bit_for_bit(two_ranks, stage, kind, shape):
    cell = two_ranks.of(loops_of_other_shapes)[f"{stage} {kind}"]
    assert cell[shape] == cell["usual"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind", "shape"), [(*cell, shape) for cell in SELDOM for shape in shapes(cell[1])])
def test_so_it_does_where_gradients_lie_in_other_buffers(two_ranks_at_length, stage, kind, shape):
    cell = two_ranks_at_length.of(loops_of_other_shapes_at_length)[f"{stage} {kind}"]
    assert cell[shape] == cell["usual"]


# What accumulates a gradient, or drops one, outside of engine.backward().


class Tiled(torch.nn.Module):
    """A model whose forward is its loss, and runs the backward of its head inside it (DeepSpeed's ALST)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False)

    def forward(self, x):
        hidden, labels = self.body(x)[None], x.detach()[None]

        def part(module, h, y):
            return (module.head(h) - y).pow(2).mean()

        return TiledFusedLogitsLoss.apply(part, self, hidden, labels, None, 1, [self.head.weight], "mean")


def tiled(engine, stray):
    engine.backward(engine(sample(1, dtype_of(engine))), rollouts=1)


def before_the_first(engine, stray):
    stray(1)
    engine.backward(loss_of(engine, engine, 2), rollouts=1)


def inside_a_window(engine, stray):
    engine.backward(loss_of(engine, engine, 1), rollouts=1)
    engine.step()
    stray(2)
    engine.backward(loss_of(engine, engine, 3), rollouts=1)


def behind_a_window(engine, stray):
    engine.backward(loss_of(engine, engine, 1), rollouts=TARGET)
    engine.step()
    stray(2)
    engine.backward(loss_of(engine, engine, 3), rollouts=1)


def before_the_step(engine, stray):
    engine.backward(loss_of(engine, engine, 1), rollouts=TARGET)
    stray(2)
    engine.step()


def before_finish(engine, stray):
    engine.backward(loss_of(engine, engine, 1), rollouts=1)
    engine.step()
    stray(2)
    engine.finish()


def on_one_rank(engine, stray):
    """The other rank hears of it at once."""
    engine.backward(loss_of(engine, engine, 1), rollouts=1)
    engine.step()
    if dist.get_rank():
        stray(2)
    engine.backward(loss_of(engine, engine, 3), rollouts=1)


REFUSED = "WindowError: gradients were changed outside of engine.backward() in window"
NOTICED_BY_DEEPSPEED = "AssertionError: The parameter 2.weight has already been reduced."


def in_a_window_without_weight(engine, stray):
    """Such a window takes no step, and must not hand the stray gradient on to the next."""
    engine.backward(loss_of(engine, engine, 1), rollouts=0)
    engine.step()
    stray(2)
    engine.finish()


STRAYS = (
    tiled,
    before_the_first,
    inside_a_window,
    behind_a_window,
    before_the_step,
    before_finish,
    in_a_window_without_weight,
)
STRAY_CELLS = [
    *((stage, "fp32", place) for stage, place in product(STAGES, (*STRAYS, on_one_rank))),
    # Gradients lie in other places there.
    *((*cell, place) for cell, place in product(CELLS, (tiled, inside_a_window, behind_a_window)) if cell[1] != "fp32"),
]
# ZeRO 3 gathers weights in its forward, so that one rank can't run it alone.
STRAY_CELLS.remove((3, "fp32", on_one_rank))


def from_elsewhere(cells):
    """By cell and place: what each rank is answered."""
    results = {}
    for stage, kind, place in cells:
        engine, _ = engine_of(stage, kind, Tiled() if place is tiled else None)
        alone = place is on_one_rank and stage == 2
        said = _answer(place, engine, _stray(engine, alone))
        results[f"{stage} {kind} {place.__name__}"] = from_all(said)
        engine.destroy()
    return results


STRAY_OFTEN = [cell for cell in STRAY_CELLS if cell[:2] in OFTEN]
STRAY_SELDOM = [cell for cell in STRAY_CELLS if cell[:2] in SELDOM]


@on_two_ranks
def gradients_from_elsewhere(folder):
    return from_elsewhere(STRAY_OFTEN)


@at_length_on_two_ranks
def gradients_from_elsewhere_at_length(folder):
    return from_elsewhere(STRAY_SELDOM)


def _answer(place, engine, stray):
    try:
        return refusal(lambda: place(engine, stray))
    except AssertionError as error:
        # DeepSpeed notices some of them itself, in the stray backward.
        return f"AssertionError: {error}"


def _stray(engine, alone):
    def stray(seed):
        loss = loss_of(engine.module, engine, seed)
        loss.backward()

    def stray_alone(seed):
        # ZeRO 2 reduces what a backward has left in its buckets; a single parameter fills none.
        (next(engine.module.parameters()).float().sum()).backward()

    return stray_alone if alone else stray


def _refused_on_every_rank(every, stage, kind, place):
    for said in every[f"{stage} {kind} {place.__name__}"]:
        assert said.startswith(REFUSED) or said.startswith(NOTICED_BY_DEEPSPEED), said


@pytest.mark.parametrize(("stage", "kind", "place"), [cell for cell in STRAY_OFTEN if cell[2] is not on_one_rank])
def test_a_gradient_from_elsewhere_is_refused_on_every_rank(two_ranks, stage, kind, place):
    _refused_on_every_rank(two_ranks.of(gradients_from_elsewhere), stage, kind, place)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind", "place"), STRAY_SELDOM)
def test_so_it_is_where_gradients_lie_in_other_buffers(two_ranks_at_length, stage, kind, place):
    _refused_on_every_rank(two_ranks_at_length.of(gradients_from_elsewhere_at_length), stage, kind, place)


@pytest.mark.parametrize("stage", STAGES[:3])
def test_a_gradient_from_elsewhere_on_one_rank_is_told_to_the_others(two_ranks, stage):
    first, second = two_ranks.of(gradients_from_elsewhere)[f"{stage} fp32 on_one_rank"]
    assert second.startswith(REFUSED), second
    assert first.startswith("RankDesyncError")
    assert REFUSED in first


@on_two_ranks
def gradients_dropped(folder):
    """model.zero_grad() inside a window, which no optimizer sees: what ranks are answered, or the weights."""
    results = {}
    for stage in STAGES:
        engine, client = engine_of(stage)

        def loop(engine=engine, client=client):
            for window in micro_batches(dist.get_rank()):
                for seed, rollouts in window:
                    engine.module.zero_grad()
                    engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
                    engine.step()

        results[f"{stage}"] = [from_all(refusal(loop)), weights(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_the_model_drops_are_refused_or_were_reduced_already(two_ranks, stage):
    said, own = two_ranks.of(gradients_dropped)[f"{stage}"]
    if stage < 2:
        assert all(one.startswith("WindowError: gradients were changed outside") for one in said)
    else:
        assert own == two_ranks.of(loops_of_other_shapes)[f"{stage} fp32"]["usual"]["weights"]


# A loss that is not finite, and a parameter that the boundary's pass leaves out.


@on_two_ranks
def losses_that_are_nan(folder):
    """By stage and clipping: weights and LR before and after a window with a NaN on one rank, and the next window."""
    results = {}
    for stage, clip in product(STAGES, (0.0, 1.0)):
        model = perceptron()
        plain = {**extended(stage), "gradient_clipping": clip}
        client = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (step + 1))
        engine, *_ = ds_parity.initialize(
            model=model, model_parameters=model.parameters(), optimizer=client, lr_scheduler=schedule, config=plain
        )
        seen = []
        for window, factor in enumerate((1.0, float("nan"), 1.0)):
            for seed, number in ((1, 0), (2, 1)):
                loss = loss_of(engine, engine, seed) * (factor if number and dist.get_rank() else 1.0)
                engine.backward(loss, rollouts=3 if number else 2)
                engine.step()
            last = engine.last_step
            seen.append({"weights": weights(engine), "skipped": last.skipped, "lr": engine.get_lr(), "step": window})
        results[f"{stage} {clip}"] = [*seen, engine.global_steps, engine.skipped_steps]
        engine.destroy()
    return results


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_takes_no_step_on_any_stage(two_ranks, stage, clip):
    first, bad, after, steps, skipped = two_ranks.of(losses_that_are_nan)[f"{stage} {clip}"]
    assert [one["skipped"] for one in (first, bad, after)] == [False, True, False]
    assert bad["weights"] == first["weights"]
    assert bad["lr"] == first["lr"] != after["lr"]
    assert after["weights"] != first["weights"]
    assert (steps, skipped) == (3, 1)
    # Adam's moments did not move either, so that all stages go on alike.
    reference = two_ranks.of(losses_that_are_nan)[f"1 {clip}"][2]["weights"]
    for own, right in zip(after["weights"], reference, strict=True):
        assert own == pytest.approx(right, abs=1e-6)


@on_two_ranks
def loaded_after_a_stray(folder):
    """By stage: whether windows go on after a checkpoint was loaded over a stray gradient, as after one without it."""
    results = {}
    for stage in STAGES:
        seen = []
        for strays in (False, True):
            engine, _ = engine_of(stage)
            engine.save_checkpoint(f"{folder}/{stage}-{strays}", tag="saved")
            if strays:
                loss_of(engine.module, engine, 9).backward()
                said = from_all(refusal(lambda e=engine: e.backward(loss_of(e, e, 1), rollouts=1)))
            engine.load_checkpoint(f"{folder}/{stage}-{strays}", tag="saved")

            def on(engine=engine):
                for window in micro_batches(dist.get_rank()):
                    usual(engine, None, window)

            after = from_all(refusal(on))
            seen.append(weights(engine))
            engine.destroy()
        results[f"{stage}"] = [said, after, seen]
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_loaded_over_a_stray_gradient_mends_it_or_the_engine_stays_refused(two_ranks, stage):
    """ZeRO keeps what came in in its buckets, where nothing takes it out."""
    said, after, (clean, mended) = two_ranks.of(loaded_after_a_stray)[f"{stage}"]
    assert all(one.startswith(REFUSED) for one in said)
    if stage == 0:
        assert after == ["nothing was raised"] * 2
        assert mended == clean
    else:
        assert all("load a checkpoint into a new engine" in one for one in (*said, *after))


@on_two_ranks
def optimizers_after_their_engine(folder):
    """Whether zero_grad() of a client's optimizer clears again once its engine is destroyed inside a window."""
    engine, client = engine_of(0)
    engine.backward(loss_of(engine, engine, 1), rollouts=1)
    engine.step()
    client.zero_grad()
    kept = [p.grad is not None for p in engine.module.parameters()]
    module = engine.module
    engine.destroy()
    client.zero_grad()
    return [kept, [p.grad is None for p in module.parameters()]]


def test_an_optimizer_outlives_the_guard_of_its_engine(two_ranks):
    kept, cleared = two_ranks.of(optimizers_after_their_engine)
    assert all(kept)
    assert all(cleared)


@on_two_ranks
def windows_ended_by_finish(folder):
    """By cell: the steps and the last loss where finish() ends a window that no boundary closed."""
    results = {}
    for stage, kind in CELLS:
        engine, _ = engine_of(stage, kind)
        for seed, rollouts in next(micro_batches(dist.get_rank()))[:2]:
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
            engine.step()
        before = weights(engine)
        last = engine.finish()
        results[f"{stage} {kind}"] = [last.step, last.rollouts, last.skipped, before != weights(engine)]
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "kind"), CELLS)
def test_finish_reduces_what_is_there_and_takes_its_step(two_ranks, stage, kind):
    """The gradients change in that reduction, which is no stray."""
    assert two_ranks.of(windows_ended_by_finish)[f"{stage} {kind}"] == [1, 6, False, True]
