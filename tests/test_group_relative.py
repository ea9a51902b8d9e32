"""GRPO's loss is the sum that its docstring says, padded or packed, and what it cuts off has no gradient."""

import math

import pytest
import torch

from ds_parity.collation import collate
from ds_parity.errors import ConfigError
from ds_parity.losses import DirectPreference, GroupRelativePolicy, PolicyGradient
from ds_parity.parity.data.model import build_tiny
from ds_parity.planning.rollout import Rollout

HELD = [
    Rollout("a", (1, 5, 6, 7, 2), prompt_length=2, advantage=1.5),
    Rollout("b", (1, 9, 8, 7, 6, 5, 2), prompt_length=3, advantage=-0.5),
    Rollout("c", (3, 4, 2), prompt_length=2, advantage=-2.0),
]
LOW, HIGH = 0.2, 0.3


def inputs(layout="padded", spread=0.4):
    """A micro-batch whose log probabilities are those of an older policy and of a reference, the same in each layout.

    They are `spread` nats off, drawn by the token's rollout and position.
    """
    model = build_tiny().double()
    made = dict(collate(HELD, layout=layout).inputs)
    generator = torch.Generator().manual_seed(3)
    off = [torch.randn(2, 6, generator=generator, dtype=torch.float64) * spread for _ in HELD]
    with torch.no_grad():
        logp = GroupRelativePolicy(model).logps(made["input_ids"], made.get("position_ids"))
    moved = torch.zeros(2, *logp.shape, dtype=torch.float64)
    start = 0
    for row, one in enumerate(HELD):
        length = len(one.tokens) - 1
        where = (row, slice(0, length)) if layout == "padded" else (0, slice(start, start + length))
        moved[:, *where] = off[row][:, :length]
        start += length + 1
    return model, {**made, "sampled_logps": logp + moved[0], "reference_logps": logp + moved[1]}


def by_hand(model, given, weight, length=None):
    """The two losses token by token, and the cut off share, in plain Python."""
    losses, divergences, cut = [], [], []
    for row, one in enumerate(HELD):
        logits = model(given["input_ids"])[row].log_softmax(-1).detach()
        own, apart, clipped = [], [], []
        for at in range(one.prompt_length, len(one.tokens)):
            logp = logits[at - 1, one.tokens[at]]
            ratio = math.exp(logp - given["sampled_logps"][row, at - 1])
            kept = min(max(ratio, 1 - LOW), 1 + HIGH)
            own.append(-min(ratio * one.advantage, kept * one.advantage))
            clipped.append(ratio * one.advantage > kept * one.advantage)
            difference = float(given["reference_logps"][row, at - 1] - logp)
            apart.append(math.exp(difference) - difference - 1)
        losses.append(own)
        divergences.append(apart)
        cut.append(sum(clipped) / len(clipped))
    return _mean(losses, weight, length), _mean(divergences, weight, length), cut


def _mean(rows, weight, length):
    if weight == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / (length or len(row)) for row in rows) / len(rows)


@pytest.mark.parametrize(("weight", "length"), [("token", None), ("rollout", None), ("rollout", 8), ("target", None)])
def test_losses_are_the_formula_token_by_token(weight, length):
    model, given = inputs()
    loss = GroupRelativePolicy(model, weight, clip_low=LOW, clip_high=HIGH, length=length)
    policy, kl, cut = loss(**given)
    expected = by_hand(model, given, weight, length)
    assert policy.item() == pytest.approx(expected[0], rel=1e-12)
    assert kl.item() == pytest.approx(expected[1], rel=1e-12)
    assert cut.tolist() == pytest.approx(expected[2])
    assert 0 < sum(cut.tolist()) < 3, "clipping had nothing to do"


@pytest.mark.parametrize("weight", ["token", "rollout", "pass"])
def test_packed_rollouts_have_the_losses_and_the_gradient_of_padded_ones(weight):
    found = []
    for layout in ("padded", "packed"):
        model, given = inputs(layout)
        policy, kl, cut = GroupRelativePolicy(model, weight, clip_low=LOW, clip_high=HIGH)(**given)
        (policy + 0.1 * kl).backward()
        gradient = torch.cat([one.grad.flatten() for one in model.parameters()])
        found.append(torch.cat([policy.detach()[None], kl.detach()[None], cut, gradient]))
    assert (found[0] - found[1]).norm() < 1e-9 * found[0].norm()


def test_a_sum_is_not_divided_by_what_the_micro_batch_contains():
    model, given = inputs()
    mean, total = (GroupRelativePolicy(model, "token", how)(**given)[0] for how in ("mean", "sum"))
    assert total.item() == pytest.approx(mean.item() * sum(one.loss_tokens for one in HELD))
    mean, total = (GroupRelativePolicy(model, "rollout", how, length=8)(**given)[0] for how in ("mean", "sum"))
    assert total.item() == pytest.approx(mean.item() * len(HELD))


@pytest.mark.parametrize("weight", ["token", "rollout"])
def test_at_ratio_1_its_gradient_is_that_of_the_policy_gradient_and_nothing_is_cut_off(weight):
    model, given = inputs(spread=0.0)
    reference = given.pop("reference_logps")
    plain = {name: value for name, value in given.items() if name != "sampled_logps"}
    found = []
    for loss in (GroupRelativePolicy(model, weight)(**given), PolicyGradient(model, weight)(**plain)):
        model.zero_grad()
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
    assert torch.allclose(*found, rtol=1e-10, atol=1e-12)
    _, kl, cut = GroupRelativePolicy(model, weight)(**given, reference_logps=reference)
    assert kl.item() == pytest.approx(0, abs=1e-12)
    assert cut.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 1.31), (-1.0, 0.79)])
def test_a_token_beyond_the_clipping_has_no_gradient(advantage, ratio):
    ratio = torch.tensor([[ratio]], requires_grad=True)
    losses, clipped = GroupRelativePolicy(torch.nn.Identity(), clip_high=HIGH).token_losses(
        ratio, torch.tensor([[advantage]])
    )
    losses.sum().backward()
    assert clipped.tolist() == [[True]]
    assert ratio.grad.item() == 0


def test_a_cap_bounds_what_clipping_leaves_where_the_advantage_is_negative():
    ratio, bad = torch.tensor([[50.0]]), torch.tensor([[-1.0]])
    free, capped = (
        GroupRelativePolicy(torch.nn.Identity(), ratio_cap=cap).token_losses(ratio, bad)[0] for cap in (None, 4.0)
    )
    assert (free.item(), capped.item()) == (50.0, 4.0)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("ratio", [3.0, 1.5, 1.0, 0.5])
def test_a_token_is_cut_off_where_its_gradient_is_0_with_a_cap_too(ratio, advantage):
    ratios = torch.tensor([[ratio]], requires_grad=True)
    losses, cut = GroupRelativePolicy(torch.nn.Identity(), ratio_cap=2.0).token_losses(
        ratios, torch.tensor([[advantage]])
    )
    losses.sum().backward()
    assert cut.item() == (ratios.grad.item() == 0)


def test_what_stands_where_nothing_was_sampled_is_not_read():
    model, given = inputs()
    free = given["loss_mask"] == 0
    changed = {name: given[name].masked_fill(free, -math.inf) for name in ("sampled_logps", "reference_logps")}
    results = []
    for one in (given, {**given, **changed}):
        model.zero_grad()
        policy, kl, _ = GroupRelativePolicy(model)(**one)
        (policy + kl).backward()
        results.append([policy.item(), kl.item(), *(p.grad.sum().item() for p in model.parameters())])
    assert results[0] == results[1]


def test_a_micro_batch_without_loss_tokens_gives_0_and_a_gradient_of_0():
    model, given = inputs()
    given["loss_mask"] = torch.zeros_like(given["loss_mask"])
    policy, kl, cut = GroupRelativePolicy(model, "token")(**given)
    (policy + kl).backward()
    assert (policy.item(), kl.item(), cut.tolist()) == (0, 0, [0, 0, 0])
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"loss_weight": "tokens"}, "loss_weight = 'tokens'"),
        ({"kl_weight": "tokens"}, "kl_weight = 'tokens'"),
        ({"loss_reduction": "max"}, "loss_reduction = 'max'"),
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": -0.1}, "clip_high = -0.1"),
        ({"clip_high": math.nan}, "clip_high = nan"),
        ({"clip_low": "x"}, "clip_low = 'x'"),
        ({"clip_low": None}, "clip_low = None"),
        ({"ratio_cap": 1.0}, "ratio_cap = 1.0"),
        ({"ratio_cap": 1.0, "clip_high": 0.0}, "ratio_cap = 1.0"),
        ({"ratio_cap": 1.1}, "ratio_cap = 1.1: .* not below 1 \\+ clip_high"),
        ({"ratio_cap": "2"}, "ratio_cap = '2'"),
        ({"length": 0}, "length = 0"),
        ({"length": math.inf}, "length = inf"),
        ({"length": "8"}, "length = '8'"),
        ({"length": 8, "loss_weight": "token"}, "leave it out where the loss is a mean over tokens"),
    ],
)
def test_a_wrong_choice_is_named(choices, says):
    with pytest.raises(ConfigError, match=says):
        GroupRelativePolicy(torch.nn.Identity(), **choices)


@pytest.mark.parametrize("name", ["sampled_logps", "reference_logps"])
def test_log_probabilities_of_another_shape_are_refused(name):
    model, given = inputs()
    given[name] = given[name].sum(-1)
    with pytest.raises(ConfigError, match=rf"{name} have the shape \(3,\), must be \(3, 6\)"):
        GroupRelativePolicy(model)(**given)


class Banning(torch.nn.Module):
    """A policy that gives some tokens no probability, as one with a padded vocabulary does."""

    def __init__(self, policy, banned):
        super().__init__()
        self.policy, self.banned = policy, banned

    def forward(self, input_ids, **given):
        logits = self.policy(input_ids, **given)
        return logits.index_fill(-1, torch.tensor(self.banned), -math.inf)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_masked_token_of_no_probability_has_no_part_in_loss_and_gradient(layout):
    """Padding, or where packed the first token of a rollout, behind the last token of the one before."""
    given = collate(HELD, layout=layout).inputs
    banned = [0] if layout == "padded" else [HELD[2].tokens[0]]
    assert torch.isin(given["input_ids"][:, 1:], torch.tensor(banned)).any()
    policy = Banning(build_tiny().double(), banned)
    loss = PolicyGradient(policy)(**given)
    loss.backward()
    means = []
    for one in HELD:
        logps = policy(torch.tensor([one.tokens]))[0].log_softmax(-1)
        places = range(one.prompt_length, len(one.tokens))
        means.append(-one.advantage * sum(logps[at - 1, one.tokens[at]] for at in places) / len(places))
    right = torch.stack(means).mean()
    gradients = torch.autograd.grad(right, list(policy.parameters()))
    assert loss.item() == pytest.approx(right.item(), rel=1e-12)
    for own, other in zip(policy.parameters(), gradients, strict=True):
        torch.testing.assert_close(own.grad, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [lambda mask: mask[:1], lambda mask: mask[0], lambda mask: mask[:, :1]])
@pytest.mark.parametrize("loss", [PolicyGradient, GroupRelativePolicy, DirectPreference])
def test_a_mask_of_another_shape_is_refused_and_not_spread(loss, shape):
    model, given = inputs()
    wrong = shape(given["loss_mask"])
    names = {"PolicyGradient": ("advantages",), "GroupRelativePolicy": ("advantages", "sampled_logps")}
    made = {name: given[name] for name in names.get(loss.__name__, ())}
    if loss is DirectPreference:
        given["input_ids"], made = given["input_ids"][:2], {"reference_logps": torch.zeros(1, 2)}
        wrong = shape(given["loss_mask"][:2])
    with pytest.raises(ConfigError, match="loss_mask"):
        loss(model)(given["input_ids"], wrong, **made)


@pytest.mark.parametrize("pairs", [1, 3])
def test_pairs_and_their_references_are_as_many(pairs):
    model, given = inputs()
    ids, mask = given["input_ids"][[0, 1, 2, 0]], given["loss_mask"][[0, 1, 2, 0]]
    with pytest.raises(ConfigError, match=f"reference_logps have {pairs} rows, and input_ids 4"):
        DirectPreference(model)(ids, mask, torch.zeros(pairs, 2))
