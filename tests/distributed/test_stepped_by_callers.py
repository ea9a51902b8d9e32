"""Windows that callers end, and losses with weights of their own, against the references: shapes the matrix has not."""

from dataclasses import replace

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.running.scenario import Scenario
from tests.distributed import sequence
from tests.distributed.asserting import assert_equal
from tests.distributed.cells import STAGES, TINY, config
from tests.distributed.sets import on_four_ranks, on_two_ranks

pytestmark = pytest.mark.ranks

ALL = ("deepspeed-loop", "torch", "ds_parity")
TIERS = [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)]
DIVIDED = {"loss_weight": "divided", "across_ranks": "mean"}


def scenario(name, stage, optimizer="SGD", passes=8, **shape):
    """Windows of uneven passes and an open end, which finish() settles."""
    section = {"boundary": "caller", "loss_weight": "token", **shape.pop("section", {})}
    extended = {**config(stage, optimizer=optimizer, passes=passes), "ds_parity": section}
    if passes is None:
        del extended["gradient_accumulation_passes"]
    wanted = {"shape": "overshoot", "windows": 4, "short": 3, "seed": 3, **TINY, **shape}
    return Scenario(f"callers-{name}-{stage}", extended, **wanted)


PLANNED = {"shape": "planned", "short": 0, "windows": 3, "micro_batch_tokens": 400}
SCENARIOS = [
    *[scenario("open", stage, optimizer="AdamW", passes=None) for stage in STAGES],
    *[scenario("uneven", stage, drive="uneven", section={"lr_progress": "rollout"}) for stage in (0, 1)],
    *[scenario("announced", stage, drive="announced", short=0) for stage in (0, 1)],
    *[scenario("streams", stage, drive="passes", section=DIVIDED) for stage in (1, 2)],
    scenario("prompts", 2, passes=3, section={"count": "prompt"}, **PLANNED),
    scenario("prompts-weighed", 3, passes=3, section={"count": "prompt", "loss_weight": "weight"}, **PLANNED),
    scenario("target", 1, section={"loss_weight": "target", "loss_reduction": "sum"}),
    scenario("passes-weigh", 0, passes=None, section={"loss_weight": "pass"}),
]
# Weights and divided losses where the counts end windows.
COUNTED = [
    replace(made, name=f"counted-{name}", config={**made.config, "ds_parity": section})
    for name, section, made in (
        ("weight", {"loss_weight": "weight", "lookahead": 12}, scenario("x", 2, drive="passes")),
        ("mean", DIVIDED, scenario("y", 1, drive="passes")),
        ("sum", {**DIVIDED, "across_ranks": "sum"}, scenario("z", 3)),
    )
]
SHARED = [scenario("shared", stage, passes=None, **sequence.SHARED) for stage in (1, 3)]
for made in (*SCENARIOS, *COUNTED):
    on_two_ranks.train(made, *ALL)
for made in SHARED:
    on_four_ranks.train(made, *ALL)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("made", [*SCENARIOS, *COUNTED], ids=lambda made: made.name)
def test_steps_are_those_of_the_references(two_ranks, made, reference, tier):
    assert_equal(two_ranks, made, reference, tier)


@pytest.mark.parametrize(("reference", "tier"), TIERS)
@pytest.mark.parametrize("made", SHARED, ids=lambda made: made.name)
def test_ranks_that_share_a_micro_batch_count_it_once(four_ranks, made, reference, tier):
    assert_equal(four_ranks, made, reference, tier)


def test_the_scenarios_hold_what_they_are_there_for(two_ranks):
    """Ranks of other numbers of passes, an open end, and totals that no estimate gets right."""
    steps = {made.name: two_ranks.trace(made, "ds_parity").steps for made in SCENARIOS}
    assert all(steps[f"callers-open-{stage}"][-1].rollouts < 8 for stage in STAGES)
    assert len({step.total for step in steps["callers-open-1"]}) > 2
    for stage in (0, 1):
        assert any(step.idle_passes for step in steps[f"callers-uneven-{stage}"])
        assert len({step.passes for step in steps[f"callers-uneven-{stage}"]}) > 1
