"""One reduction for all backwards of a window that the caller ends: DeepSpeed's coalesce_grad_reduction."""

import pytest

from ds_parity.config.features import COALESCED
from ds_parity.engine.internals.installed import refused_by_call
from tests.distributed.engines import from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks
from tests.distributed.test_callers_boundary import (
    ALIKE,
    OTHERS,
    PLANS,
    announced,
    bare_config,
    engine_of,
    keyed,
    oracle,
    plain,
    run,
    seeds,
    state_of,
)
from tests.distributed.test_callers_windows import BrokenError
from tests.distributed.test_loop_shapes import CELLS, KINDS, loss_of, weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
if why := refused_by_call(COALESCED.name):
    pytest.skip(why, allow_module_level=True)
# DeepSpeed takes the block on ZeRO 1 to 3, and not for the wrapper that keeps fp32 gradients of bf16 weights itself.
TAKEN = [(stage, kind) for stage, kind in CELLS if stage and not (stage == 1 and kind.startswith("fp32 a"))]
NOT_TAKEN = [cell for cell in CELLS if cell not in TAKEN]


def coalesced(engine, window):
    with engine.coalesce_grad_reduction():
        for seed, rollouts in window:
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
    engine.step()


def coalesced_and_announced(engine, window):
    """As DeepSpeed's own tests write it."""
    with engine.coalesce_grad_reduction():
        for seed, rollouts in window:
            engine.set_gradient_accumulation_boundary((seed, rollouts) == window[-1])
            engine.backward(loss_of(engine, engine, seed), rollouts=rollouts)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def by_hand(engine, window):
    """DeepSpeed's own block, with losses divided by hand."""
    with engine.coalesce_grad_reduction():
        for seed, rollouts in window:
            engine.backward(loss_of(engine, engine, seed).float() / (10 / (2 * rollouts)), scale_wrt_gas=False)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    engine.set_gradient_accumulation_boundary(False)


def past_an_empty_block(stage, kind, empty):
    """The weights after two windows, with a block without a backward between them, and without."""
    engine = engine_of(keyed(stage, kind))
    first, second, *_ = seeds(OTHERS)
    coalesced(engine, first)
    said = None
    if empty:
        with engine.coalesce_grad_reduction():
            pass
        said = refusal(engine.step)
    plain(engine, second)
    trained = weights(engine)
    engine.destroy()
    return trained, said


def loaded_after_an_exception(stage, folder):
    """A checkpoint throws a block's window away, and training goes on as if it had not been there."""
    engine = engine_of(keyed(stage, "fp32"))
    first, second, *_ = seeds(OTHERS)
    coalesced(engine, first)
    engine.save_checkpoint(f"{folder}/block{stage}", tag="saved")
    try:
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, engine, 5), rollouts=3)
            raise BrokenError
    except BrokenError:
        engine.load_checkpoint(f"{folder}/block{stage}", tag="saved")
    coalesced(engine, second)
    trained = weights(engine)
    engine.destroy()
    return trained


def alternating(engine, window):
    """Windows of every kind behind one another, so that none leaves anything to the next."""
    loops = (coalesced, plain, announced)
    loops[engine.window.index % 3](engine, window)


def without_announcing(engine, window):
    """The same where a rank may have no backward that it could announce."""
    (coalesced, plain)[engine.window.index % 2](engine, window)


def a_step_inside(engine):
    with engine.coalesce_grad_reduction():
        plain(engine, seeds(ALIKE)[0])


def a_backward_behind(engine):
    window = seeds(ALIKE)[0]
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, engine, window[0][0]), rollouts=window[0][1])
    engine.backward(loss_of(engine, engine, window[1][0]), rollouts=window[1][1])


def an_exception_inside(engine):
    """It is the caller's own that comes out; the window is lost."""
    window = seeds(ALIKE)[0]
    try:
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, engine, window[0][0]), rollouts=window[0][1])
            raise BrokenError
    except BrokenError:
        engine.step()


def a_stray_inside(engine):
    """A gradient that was not counted lies beside those that were."""
    window = seeds(ALIKE)[0]
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, engine, window[0][0]), rollouts=window[0][1])
        loss_of(engine, engine, 7).backward()


def cleared_inside(engine):
    """What was counted is gone."""
    window = seeds(ALIKE)[0]
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, engine, window[0][0]), rollouts=window[0][1])
        engine.module.zero_grad()
        engine.backward(loss_of(engine, engine, window[1][0]), rollouts=window[1][1])


def finished_inside(engine):
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, engine, 1), rollouts=1)
        engine.finish()


REFUSED = {
    a_step_inside: "WindowError: window 0 can't end inside coalesce_grad_reduction()",
    finished_inside: "WindowError: window 0 can't end inside coalesce_grad_reduction()",
    a_stray_inside: "WindowError: gradients were changed outside of engine.backward() in window 0",
    cleared_inside: "WindowError: gradients were changed outside of engine.backward() in window 0",
    a_backward_behind: "WindowError: backward() in window 0 after its last one: its gradients have been reduced",
    an_exception_inside: "WindowError: window 0 has a backward() that was counted and then raised",
}


@at_length_on_two_ranks
def coalesced_windows(folder):
    """By cell: what loops with one reduction a window come to."""
    results = {"oracle": {name: oracle(plan) for name, plan in PLANS.items()}}
    for stage, kind in TAKEN:
        config = keyed(stage, kind)
        bare = engine_of(bare_config(stage, kind))
        for window in seeds(ALIKE):
            by_hand(bare, window)
        cell = {"by hand": weights(bare)}
        bare.destroy()
        for name, plan in PLANS.items():
            if name != "uneven" or stage < 2:
                cell[name] = run(config, plan, coalesced)
                loop = without_announcing if name == "uneven" else alternating
                cell[f"{name}, alternating"] = run(config, plan, loop)
        cell["announced"] = run(config, ALIKE, coalesced_and_announced)
        cell["plain"] = run(config, ALIKE, plain)
        results[f"{stage} {kind}"] = cell
    for stage, kind in [(1, "fp32"), (2, "fp32"), (2, "offload"), (3, "fp32"), (3, "offload")]:
        past = [past_an_empty_block(stage, kind, empty) for empty in (True, False)]
        results[f"{stage} {kind} empty"] = [past[0][0] == past[1][0], past[0][1]]
    for stage in (1, 2, 3):
        first, second, *_ = seeds(OTHERS)
        whole = engine_of(keyed(stage, "fp32"))
        coalesced(whole, first)
        coalesced(whole, second)
        results[f"{stage} loaded"] = [loaded_after_an_exception(stage, folder), weights(whole)]
        whole.destroy()
        for play in REFUSED:
            engine = engine_of(keyed(stage, "fp32"))
            results[f"{stage} {play.__name__}"] = from_all(refusal(lambda e=engine, p=play: p(e)))
            engine.destroy()
    for stage, kind in NOT_TAKEN:
        engine = engine_of(keyed(stage, kind))
        with pytest.raises(NotImplementedError) as caught, engine.coalesce_grad_reduction():
            pass
        plain(engine, seeds(ALIKE)[0])
        results[f"{stage} {kind}"] = [str(caught.value), state_of(engine)["steps"][0]]
        engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "kind"), [cell for cell in TAKEN if "bf16" not in KINDS[cell[1]]])
@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_those_of_the_oracle(two_ranks_at_length, stage, kind, plan):
    if plan == "uneven" and stage > 1:
        pytest.skip("ZeRO 2 and 3 are to run the same number of backwards on every rank")
    results = two_ranks_at_length.of(coalesced_windows)
    for how in (plan, f"{plan}, alternating"):
        for right, own in zip(results["oracle"][plan], results[f"{stage} {kind}"][how]["weights"], strict=True):
            assert own == pytest.approx(right, abs=2e-7), how


@pytest.mark.parametrize(("stage", "kind"), TAKEN)
def test_the_same_bits_as_deepspeeds_own_block(two_ranks_at_length, stage, kind):
    cell = two_ranks_at_length.of(coalesced_windows)[f"{stage} {kind}"]
    assert cell["alike"]["weights"] == cell["by hand"]
    assert cell["announced"] == cell["alike"]
    # What is counted does not depend on where it is reduced; sums of several reductions are rounded otherwise.
    assert [cell["alike"][what] for what in ("steps", "last")] == [cell["plain"][what] for what in ("steps", "last")]


@pytest.mark.parametrize("play", REFUSED)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_block_cannot_be_used_for_is_refused_on_every_rank(two_ranks_at_length, stage, play):
    said = two_ranks_at_length.of(coalesced_windows)[f"{stage} {play.__name__}"]
    assert all(one.startswith(REFUSED[play]) for one in said), said


@pytest.mark.parametrize(("stage", "kind"), [(1, "fp32"), (2, "fp32"), (2, "offload"), (3, "fp32"), (3, "offload")])
def test_a_block_without_a_backward_leaves_nothing_behind(two_ranks_at_length, stage, kind):
    same, said = two_ranks_at_length.of(coalesced_windows)[f"{stage} {kind} empty"]
    assert said.startswith("WindowError: step() in window 1 without a backward()")
    assert same


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_after_an_exception_in_a_block_a_checkpoint_is_the_way_out(two_ranks_at_length, stage):
    again, whole = two_ranks_at_length.of(coalesced_windows)[f"{stage} loaded"]
    assert again == whole


@pytest.mark.parametrize(("stage", "kind"), NOT_TAKEN)
def test_where_deepspeed_has_no_such_block_it_says_so_and_the_engine_goes_on(two_ranks_at_length, stage, kind):
    said, steps = two_ranks_at_length.of(coalesced_windows)[f"{stage} {kind}"]
    assert "coalesce_grad_reduction" in said
    assert steps == 1
