"""Rollouts that lie on several ranks or in several passes: groups, turns, and preferences weighed by tokens."""

import pytest
import torch
import torch.distributed as dist

import ds_parity
from ds_parity.collation import collate, micro_batches, to_device
from ds_parity.losses import DirectPreference
from ds_parity.parity.data.model import build_tiny
from ds_parity.parity.data.rollouts import load_rollouts, shorten
from ds_parity.parity.running import weights
from ds_parity.planning import PreferencePair, group_advantages
from tests.distributed.cells import STAGES, config
from tests.distributed.engines import build, forward, from_all, one_pass, refusal
from tests.distributed.sets import at_length_on_two_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROMPTS = ["a", "b", "a", "c", "b", "a", "a"]

REWARDS = [1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 1.0]


@at_length_on_two_ranks
def grpo(folder):
    """Seven rollouts of three prompts dealt out in turn, so that groups lie on both ranks; then all on one rank."""
    rank = dist.get_rank()
    engine = build(config(2, passes=4))
    own = engine.group_advantages(PROMPTS[rank::2], REWARDS[rank::2])
    centred = engine.group_advantages(PROMPTS[rank::2], REWARDS[rank::2], by_std=False)
    alone = engine.group_advantages([] if rank else PROMPTS, [] if rank else REWARDS)
    short = refusal(lambda: engine.group_advantages(["a"], [1.0] * (1 + rank)))
    return {"own": from_all(own), "centred": from_all(centred), "alone": from_all(alone), "short": from_all(short)}


class TestGroupAdvantages:
    def test_are_those_of_all_rollouts_in_one_list(self, two_ranks_at_length):
        result, expected = two_ranks_at_length.of(grpo), group_advantages(PROMPTS, REWARDS)
        assert result["own"] == [expected[0::2], expected[1::2]]
        assert result["centred"][0] == group_advantages(PROMPTS, REWARDS, by_std=False)[0::2]
        assert result["own"][0] != group_advantages(PROMPTS[0::2], REWARDS[0::2]), "groups do lie on both ranks"

    def test_a_rank_may_have_none(self, two_ranks_at_length):
        assert two_ranks_at_length.of(grpo)["alone"] == [group_advantages(PROMPTS, REWARDS), []]

    def test_a_rank_that_gives_too_few_is_named_on_every_rank(self, two_ranks_at_length):
        for said in two_ranks_at_length.of(grpo)["short"]:
            assert said == (
                "ConfigError: group_advantages() on rank 1 of those that step together: 2 rewards for 1 prompt ids: "
                "give one of each for every rollout"
            )


@at_length_on_two_ranks
def turns_by_share(folder):
    """Turns of a rollout, each with its share of the rollout's loss, under a weight of rollouts and summed losses."""
    results = {}
    for stage in STAGES:
        extended = config(stage, passes=4, loss_reduction="sum")
        whole, turned = build(extended), build(extended)
        for seed in (1, 3):
            whole.backward(forward(whole, seed) + forward(whole, seed + 1), rollouts=1, tokens=6)
            whole.step()
            turned.backward(forward(turned, seed), rollouts=0, tokens=3)
            turned.step()
            turned.backward(forward(turned, seed + 1), rollouts=1, tokens=3)
            turned.step()
        one, other = whole.last_step, turned.last_step
        moved = weights.vector(whole.module) - weights.vector(turned.module)
        results[stage] = {
            "difference": float(moved.abs().max()),
            "loss": [one.loss, other.loss],
            "norm": [one.grad_norm, other.grad_norm],
            "passes": [one.passes, other.passes],
            "idle": other.idle_passes,
            "rollouts": [one.rollouts, other.rollouts],
        }
    mean = build(config(1, passes=4))
    results["mean"] = refusal(lambda: mean.backward(forward(mean, 1), rollouts=0, tokens=3))
    return results


@at_length_on_two_ranks
def turns_that_end_open(folder):
    """The data ends after turns that finish no rollout: nothing to divide by, nothing stepped, nothing left behind."""
    results = {}
    for stage in STAGES:
        engine, fresh = (build(config(stage, passes=4, loss_reduction="sum")) for _ in range(2))
        before = weights.vector(engine.module)
        one_pass(engine, 5, rollouts=0, tokens=3)
        engine.finish()
        unmoved = torch.equal(before, weights.vector(engine.module))
        for one in (engine, fresh):
            for seed in (1, 2):
                one_pass(one, seed, rollouts=1, tokens=3)
        results[stage] = {
            "unmoved": unmoved,
            "clean": torch.equal(weights.vector(engine.module), weights.vector(fresh.module)),
            "stepped": not torch.equal(before, weights.vector(engine.module)),
        }
    return results


class TestTurns:
    def test_that_give_their_shares_add_up_to_the_rollout(self, two_ranks_at_length, stage):
        result = two_ranks_at_length.of(turns_by_share)[stage]
        assert result["difference"] < 1e-7
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-6)
        assert result["norm"][0] == pytest.approx(result["norm"][1], rel=1e-6)
        assert (result["passes"], result["rollouts"], result["idle"]) == ([2, 4], [4, 4], 0)

    def test_under_a_mean_over_rollouts_are_refused_by_name(self, two_ranks_at_length):
        said = two_ranks_at_length.of(turns_by_share)["mean"]
        assert said.startswith("WindowError: a micro-batch of 3 loss tokens finishes 0 rollouts")
        assert "loss_weight 'token'" in said

    def test_that_end_with_no_rollout_finished_take_no_step_and_leave_nothing(self, two_ranks_at_length, stage):
        assert two_ranks_at_length.of(turns_that_end_open)[stage] == {"unmoved": True, "clean": True, "stepped": True}


@at_length_on_two_ranks
def preferences(folder):
    """DPO over planned micro-batches of two ranks, weighed by tokens, beside the whole batch in plain torch."""
    pairs = preference_pairs(24)
    results = {}
    for stage in STAGES:
        module = DirectPreference(build_tiny(), loss_weight="token")
        whole = DirectPreference(build_tiny().double(), loss_weight="token")
        extended = config(stage, passes=len(pairs), loss_weight="token")
        engine, *_ = ds_parity.initialize(model=module, model_parameters=module.parameters(), config=extended)
        planned = ds_parity.plan(pairs, dp_world_size=dist.get_world_size(), target=len(pairs), max_tokens=1500)
        for batch in engine.passes(to_device(one, engine.device) for one in micro_batches(planned, dist.get_rank())):
            loss, margins, tokens = engine(**batch.inputs)
            engine.record("accuracy", (margins > 0).float())
            engine.record("margin", margins, tokens)
            engine.backward(loss)
            engine.step()
        loss, margins, tokens = whole(**collate(pairs).inputs)
        loss.backward()
        step = engine.last_step
        results[stage] = {
            "loss": [step.loss, float(loss)],
            "norm": [step.grad_norm, float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))],
            "accuracy": [step.metrics["accuracy"], float((margins > 0).double().mean())],
            "margin": [step.metrics["margin"], float((margins * tokens).sum() / tokens.sum())],
            "passes": step.passes,
            "means": float(margins.mean()),
        }
    return results


def preference_pairs(count):
    """A right and a wrong solution of each question, of many lengths; the reference knows nothing but some noise."""
    answers = {}
    for rollout in load_rollouts():
        answers.setdefault(rollout.prompt_id, {}).setdefault(rollout.reward, rollout)
    both = [answer for answer in answers.values() if len(answer) == 2][:count]
    pairs = [shorten((answer[1.0], answer[0.0]), 200 + 30 * (n % 7)) for n, answer in enumerate(both)]
    return [
        PreferencePair(*pair, -6.3 * pair[0].loss_tokens, (0.3 * (n % 3) - 6.5) * pair[1].loss_tokens)
        for n, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize("what", ["loss", "norm", "accuracy", "margin"])
def test_preferences_weighed_by_tokens_equal_the_whole_batch_in_plain_torch(two_ranks_at_length, stage, what):
    """The loss and the margin weigh tokens, the accuracy is a mean over pairs; several passes on two ranks."""
    result = two_ranks_at_length.of(preferences)[stage]
    engine, whole = result[what]
    assert engine == pytest.approx(whole, rel=2e-5)
    assert result["passes"] > 2
    assert 0 < result["accuracy"][1] < 1
    assert result["margin"][1] != pytest.approx(result["means"], rel=1e-2), "weights do make a difference here"
