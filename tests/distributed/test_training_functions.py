"""A user's training function on both sides, and its own loss on whole windows; a model of transformers."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.running.scenario import Scenario
from tests.distributed.asserting import assert_equal
from tests.distributed.cells import STAGES, TINY, config
from tests.distributed.sets import on_two_ranks

pytestmark = pytest.mark.ranks
ALL = ("deepspeed-loop", "torch", "ds_parity")
TERMS = {"a": {"weight": "token"}, "b": {"weight": "rollout", "coefficient": 0.5}}


def trained(function, stage=2, dtype="fp32", **section):
    name = "-".join(map(str, ("trained", function, stage, dtype, section.get("loss_weight", "terms"))))
    extended = config(stage, dtype, **section)
    how = {"shape": "overshoot", "windows": 3, "short": 2, "seed": 3, **TINY, "max_tokens": 200}
    return Scenario(name, extended, train=f"tests.parity.training:{function}", **how)


RIGHT = [
    *[trained("nll", stage, loss_weight="token") for stage in STAGES],
    trained("nll", dtype="bf16", loss_weight="token"),
    trained("by_rollouts", loss_weight="rollout"),
    trained("by_rollouts", loss_weight="target"),
    trained("summed", loss_weight="token", loss_reduction="sum"),
    trained("two_terms", terms=TERMS, lookahead="window"),
]
OTHER_LOSS = [trained("by_rollouts", stage, loss_weight="token") for stage in STAGES]
for scenario in (*RIGHT, *OTHER_LOSS):
    on_two_ranks.train(scenario, *ALL)


@pytest.mark.parametrize("scenario", RIGHT, ids=lambda scenario: scenario.name)
class TestALossThatIsWhatTheConfigurationSays:
    def test_steps_as_the_engine_driven_by_hand_does_with_it(self, two_ranks, scenario):
        assert_equal(two_ranks, scenario, "deepspeed-loop", Tier.EXACT)

    def test_is_the_same_on_whole_windows(self, two_ranks, scenario):
        assert_equal(two_ranks, scenario, "torch", Tier.REASSOCIATED)


@pytest.mark.parametrize("scenario", OTHER_LOSS, ids=lambda scenario: scenario.name)
def test_another_loss_agrees_where_both_sides_run_it_and_not_on_whole_windows(two_ranks, scenario):
    """A mean over rollouts, which the configuration weighs by tokens."""
    assert_equal(two_ranks, scenario, "deepspeed-loop", Tier.EXACT)
    whole, ours = (two_ranks.trace(scenario, engine) for engine in ("torch", "ds_parity"))
    comparison = compare(whole, ours, Tier.REASSOCIATED, "fp32")
    first = {one.field: one for one in comparison.differences if one.step == 1}
    assert not comparison.equal
    assert first["loss"].difference > 10 * first["loss"].bound


def of_transformers(stage):
    path = Path(__file__).parent / "small_model" / "config.json"
    extended = config(stage, loss_weight="token")
    return Scenario(f"gpt2-{stage}", extended, shape="overshoot", windows=3, model=f"hf:{path}", max_tokens=96)


if find_spec("transformers"):
    for stage in (0, 3):
        on_two_ranks.train(of_transformers(stage), *ALL)


@pytest.mark.skipif(not find_spec("transformers"), reason="models of transformers need transformers")
@pytest.mark.parametrize(("reference", "tier"), [("deepspeed-loop", Tier.EXACT), ("torch", Tier.REASSOCIATED)])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_transformers_steps_right(two_ranks, stage, reference, tier):
    assert_equal(two_ranks, of_transformers(stage), reference, tier)
