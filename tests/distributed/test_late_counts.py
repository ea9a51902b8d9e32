"""Counts that travel while a backward runs, on ZeRO 0 and 1: the steps are the same, bit for bit."""

import random
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ds_parity.engine.late_pass import LatePass
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.parity.running import weights
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import Batch, build, exchanges_of, forward, from_all, refusal
from tests.distributed.sets import at_length_on_two_ranks, on_two_ranks

pytestmark = pytest.mark.ranks

OFFLOADED = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
CASES = {
    **{f"ZeRO {stage}": (stage, {}) for stage in STAGES},
    "clipping": (1, {"gradient_clipping": 0.01}),
    "offload": (1, {"zero_optimization": OFFLOADED, "zero_force_ds_cpu_optimizer": False}),
    "overlap": (1, {"zero_optimization": {"stage": 1, "overlap_comm": True}}),
}
"""Cases to stage, and other keys."""
LATE = {"ZeRO 0", "ZeRO 1", "clipping", "offload"}


def _own(rank):
    """Uneven micro-batches, empty ones among them; rank 1 ends earlier."""
    generator = random.Random(rank)
    sizes = [generator.choice((0, 1, 1, 2, 3)) for _ in range(31 - 6 * rank)]
    return [Batch(number, rollouts, 0, rollouts * (1 + number % 3)) for number, rollouts in enumerate([2, *sizes])]


def _steps(case, drive, late):
    """What passes come to: every step, the weights, how many passes waited late, exchanges."""
    stage, more = CASES[case]
    engine = build({**config(stage, passes=8, loss_weight="token"), **more})
    steps, run = [], LatePass.run
    with (
        patch.object(LatePass, "run", autospec=True, side_effect=run) as counted,
        patch.object(LatePass, "is_possible", LatePass.is_possible if late else lambda _: False),
    ):
        own = _own(dist.get_rank())
        for one in engine.passes(own) if drive == "passes" else own[:25]:
            given = {} if drive == "passes" else {"rollouts": one.rollouts, "tokens": one.tokens}
            engine.backward(forward(engine, one.seed), **given)
            engine.step()
            if engine.window.passes == 0:
                steps.append(engine.last_step.model_dump())
        engine.finish()
    found = {"steps": [*steps, engine.last_step.model_dump()], "weights": weights.vector(engine.module).tolist()}
    return {"found": from_all(found), "late": counted.call_count, "exchanges": exchanges_of(engine)}


@at_length_on_two_ranks
def late_or_not(folder):
    """Every case, driven by a loop and by passes(), both ways."""
    return {
        f"{case}, {drive}": [_steps(case, drive, late) for late in (True, False)]
        for case in CASES
        for drive in ("loop", "passes")
    }


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["loop", "passes"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_bit_for_bit_wherever_counts_are_waited_for(two_ranks_at_length, case, drive):
    late, early = two_ranks_at_length.of(late_or_not)[f"{case}, {drive}"]
    assert late["found"] == early["found"]
    assert late["exchanges"] == early["exchanges"]
    assert len(late["found"][0]["steps"]) > 4
    assert early["late"] == 0
    assert (late["late"] > 10) == (case in LATE)


@on_two_ranks
def order(folder):
    """In which order a pass runs its backward and waits for its counts; and what happens where one of both raises."""
    said, learn = [], Upcoming.learn
    engine = build(config(1, passes=8, loss_weight="token"))
    bare = engine.__wrapped__
    backward = bare.backward

    def noted(*args, **kwargs):
        said.append("backward")
        return backward(*args, **kwargs)

    with (
        patch.object(Upcoming, "learn", lambda self: (said.append("counts"), learn(self))[1]),
        patch.object(bare, "backward", noted),
    ):
        for number in range(4):
            engine.backward(forward(engine, number), rollouts=1, tokens=3)
            engine.step()
    return {"order": said}


def test_a_pass_waits_for_its_counts_behind_its_backward_but_for_the_first_of_a_window(two_ranks):
    assert two_ranks.of(order)["order"] == ["counts", "backward", *["backward", "counts"] * 3]


@on_two_ranks
def refused(folder):
    """A surplus that is an error, in the pass that brings it: counts are waited for in front, and nothing is run."""
    engine = build(config(1, passes=4, overshoot="error"))
    engine.backward(forward(engine, 0), rollouts=1)
    engine.step()
    too_much = refusal(lambda: engine.backward(forward(engine, 0), rollouts=2))
    engine.backward(forward(engine, 0), rollouts=1)
    engine.step()
    return from_all({"said": too_much, "steps": engine.global_steps})


def test_a_surplus_that_is_an_error_is_refused_before_there_is_a_gradient(two_ranks):
    for one in two_ranks.of(refused):
        assert one["said"].startswith("WindowError: window 0 holds 6 rollouts, 2 more than its target of 4")
        assert one["steps"] == 1
