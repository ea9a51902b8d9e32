"""The decoder is causal, deterministic and wholly used; the loss is the sum that its docstring says."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_parity.collation import collate
from ds_parity.errors import ConfigError
from ds_parity.losses import PolicyGradient
from ds_parity.parity.data.model import TinyDecoder, build, build_tiny
from ds_parity.parity.data.rollouts import BOS, EOS, VOCAB
from ds_parity.planning.rollout import Rollout

WEIGHTS = ["rollout", "token", "pass", "target"]
SHORT = Rollout("a", (BOS, 5, 6, EOS), prompt_length=2, advantage=1.5)
LONG = Rollout("b", (BOS, 9, 8, 7, 6, 5, EOS), prompt_length=3, advantage=-0.5)


class Bigram(nn.Module):
    """Logits that depend on the present token alone, so that a loss can be computed on paper."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(9, dtype=torch.float64).view(3, 3).sin())

    def forward(self, input_ids):
        return self.table[input_ids]


def gradients(model, rollouts, **choices):
    model.zero_grad()
    loss = PolicyGradient(model, **choices)(**collate(rollouts).inputs)
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("make", "low", "high"), [(build_tiny, 20_000, 30_000), (build, 131_000, 133_000)])
def test_models_have_the_size_that_is_promised(make, low, high):
    assert low < sum(parameter.numel() for parameter in make().parameters()) < high


def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, two, other = build_tiny(3), build_tiny(3), build_tiny(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_logits_have_the_stated_shape_and_never_see_later_tokens():
    model = build_tiny().double()
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 7:] = 1
    assert model(ids).shape == (2, 12, VOCAB)
    assert torch.allclose(model(ids)[:, :7], model(changed)[:, :7], rtol=0, atol=1e-12)


def test_positions_matter():
    model = build_tiny().double()
    logits = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(logits[0, 2], logits[1, 2], rtol=0, atol=1e-6)


def test_every_parameter_has_a_gradient_that_is_not_tiny():
    model = build()
    gradients(model, [SHORT, LONG])
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-4, name


def test_the_model_runs_in_half_precision_and_the_loss_is_fp32():
    model = build_tiny().bfloat16()
    loss, _ = gradients(model, [SHORT, LONG])
    assert loss.dtype == torch.float32
    assert loss.shape == ()


def test_a_sequence_beyond_max_length_is_refused():
    with pytest.raises(ConfigError, match="max_length is 4"):
        TinyDecoder(width=8, layers=1, heads=1, max_length=4)(torch.zeros(1, 5, dtype=torch.int64))


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match="width = 12"):
        TinyDecoder(width=12, heads=4)


@pytest.mark.parametrize(
    "choice", [{"loss_weight": "tokens"}, {"loss_reduction": "avg"}, {"objective": "ppo"}], ids=lambda c: next(iter(c))
)
def test_an_unknown_choice_is_refused_with_those_that_exist(choice):
    with pytest.raises(ConfigError, match="must be one of"):
        PolicyGradient(nn.Identity(), **choice)


def paper_loss(nll, loss_weight, loss_reduction):
    """The loss of rows [0 1 2 0] (last two score) and [2 2 1 .] (last one scores), written out term by term."""
    logp = torch.arange(9, dtype=torch.float64).view(3, 3).sin().log_softmax(-1)
    first = [-logp[1, 2], -logp[2, 0]] if nll else [-2.0 * logp[1, 2], -2.0 * logp[2, 0]]
    second = [-logp[2, 1]] if nll else [0.25 * logp[2, 1]]
    terms = first + second if loss_weight == "token" else [(first[0] + first[1]) / 2, second[0]]
    return sum(terms) / (len(terms) if loss_reduction == "mean" or loss_weight == "pass" else 1)


@pytest.mark.parametrize("loss_weight", WEIGHTS)
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("objective", ["nll", "policy_gradient"])
def test_the_loss_is_that_computed_by_hand(objective, loss_reduction, loss_weight):
    inputs = {
        "input_ids": torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]]),
        "loss_mask": torch.tensor([[0.0, 1, 1], [0, 1, 0]]),
        "advantages": torch.tensor([2.0, -0.25]),
    }
    loss = PolicyGradient(Bigram(), loss_weight, loss_reduction, objective)(**inputs)
    torch.testing.assert_close(loss, paper_loss(objective == "nll", loss_weight, loss_reduction), rtol=1e-14, atol=0)


def test_the_policy_gradient_is_advantage_times_that_of_the_negative_log_likelihood():
    """d(-A * logp) = A * d(-logp)."""
    model = build_tiny().double()
    _, policy = gradients(model, [SHORT])
    _, likelihood = gradients(model, [SHORT], objective="nll")
    torch.testing.assert_close(policy, SHORT.advantage * likelihood, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_weight", WEIGHTS)
@pytest.mark.parametrize("objective", ["nll", "policy_gradient"])
def test_padding_changes_neither_loss_nor_gradient(objective, loss_weight):
    """The sum over a padded batch is that over its rows, alone and without padding; a pass is one unit: their mean."""
    model = build_tiny().double()
    rows = 2 if loss_weight == "pass" else 1
    choices = {"loss_weight": loss_weight, "loss_reduction": "sum", "objective": objective}
    together = gradients(model, [SHORT, LONG], **choices)
    apart = [gradients(model, [rollout], **choices) for rollout in (SHORT, LONG)]
    for whole, *parts in zip(together, *apart, strict=True):
        torch.testing.assert_close(whole * rows, sum(parts), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("loss_weight", "units"), [("rollout", 2), ("pass", 1), ("target", 2), ("token", 6)])
def test_mean_is_sum_over_the_number_of_weight_units(loss_weight, units):
    """Two rollouts, one pass, or their 2 + 4 loss tokens."""
    model = build_tiny().double()
    mean = gradients(model, [SHORT, LONG], loss_weight=loss_weight)
    total = gradients(model, [SHORT, LONG], loss_weight=loss_weight, loss_reduction="sum")
    for one, other in zip(mean, total, strict=True):
        torch.testing.assert_close(one * units, other, rtol=1e-12, atol=1e-13)


def test_token_and_rollout_weight_differ_where_lengths_do():
    model = build_tiny().double()
    _, by_rollout = gradients(model, [SHORT, LONG], loss_weight="rollout")
    _, by_token = gradients(model, [SHORT, LONG], loss_weight="token")
    assert not torch.allclose(by_rollout, by_token, rtol=1e-2)


@pytest.mark.parametrize("loss_weight", ["rollout", "token"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("objective", ["nll", "policy_gradient"])
def test_an_idle_micro_batch_gives_0_and_a_zero_gradient_on_every_parameter(objective, loss_reduction, loss_weight):
    model = build_tiny()
    loss, gradient = gradients(model, [], objective=objective, loss_reduction=loss_reduction, loss_weight=loss_weight)
    assert loss == 0
    assert not gradient.any()


def test_a_policy_may_return_an_object_with_logits():
    class Wrapped(Bigram):
        def forward(self, input_ids):
            return SimpleNamespace(logits=super().forward(input_ids))

    inputs = {
        "input_ids": torch.tensor([[0, 1, 2]]),
        "loss_mask": torch.tensor([[0.0, 1]]),
        "advantages": torch.ones(1),
    }
    assert PolicyGradient(Wrapped(), objective="nll")(**inputs) == PolicyGradient(Bigram(), objective="nll")(**inputs)
