"""The torch reference computes the step's definition: one forward over a window gives sum(w * l) / sum(w)."""

import pytest
import torch

from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.subjects.oracle import PlannedWindow, given_share, weight, weights_of_terms, windows_of
from ds_parity.parity.subjects.references.alone import train_alone, window_loss
from tests.distributed import cells

REDUCTIONS = ("mean", "sum")
OWN = ({"loss_weight": "weight"}, *({"loss_weight": "divided", "across_ranks": how} for how in ("sum", "mean")))


def scenario(loss_weight, reduction="mean", objective="policy_gradient"):
    """Three windows that overshoot and one that stays open, with idle ranks and 1 to 5 rollouts a micro-batch."""
    return of_section({"loss_weight": loss_weight, "loss_reduction": reduction}, objective)


def of_section(section, objective="policy_gradient"):
    config = cells.config(0, passes=8, **section)
    return Scenario("alone", config, shape="overshoot", windows=4, short=3, seed=3, objective=objective, **cells.TINY)


def by_definition(model, passes, window, settings):
    """Sum over ranks and passes of weight * loss / total, a forward for every micro-batch."""
    terms = []
    for batch in (batch for row in passes[window.first : window.last + 1] for batch in row if batch.rollouts):
        loss = model(**batch.inputs)
        assert loss.dtype == torch.float64
        loss = loss * given_share(batch, window)
        terms.append(loss * (1 if settings.loss_reduction == "sum" else weight(batch, settings.loss_weight)))
    return torch.stack(terms).sum() / window.total


TERMS = {
    "policy": {"weight": "token"},
    "kl": {"weight": "rollout", "coefficient": 0.25},
    "router": {"weight": "pass", "coefficient": -0.5},
    "own": {"weight": "weight", "coefficient": 2.0},
    "fixed": {"weight": "target", "coefficient": 0.1},
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("boundary", ["rollouts", "caller"])
def test_terms_are_means_of_their_own(boundary, reduction):
    """Each by a forward for every micro-batch, and by one over the window."""
    reductions = {} if reduction == "mean" else {"loss_reduction": "sum"}
    named = {name: term for name, term in TERMS.items() if reduction == "mean" or name != "own"}
    wanted = of_section({"terms": named, "boundary": boundary, **reductions})
    model, layout, passes = wanted.build().double(), wanted.layout(), wanted.batches()
    for window in windows_of(passes, wanted.settings):
        sums = {name: [0.0, 0.0] for name in named}
        for batch in (batch for row in passes[window.first : window.last + 1] for batch in row if batch.rollouts):
            weights = weights_of_terms(batch, wanted.settings)
            for name, loss in model(**batch.inputs).items():
                # A term that a micro-batch does not weigh is no part of its sum either.
                times = weights[name] if reduction == "mean" else float(weights[name] > 0)
                sums[name] = [sums[name][0] + times * loss, sums[name][1] + weights[name]]
        expected = sum(
            term.coefficient * sums[name][0] / (8 if name == "fixed" else sums[name][1])
            for name, term in wanted.settings.terms.items()
        )
        found, means = window_loss(model, layout, window, wanted.settings)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        own = {name: float(total.detach() / held) for name, (total, held) in sums.items()}
        assert means == pytest.approx(own, rel=1e-9)


def gradient(loss, model):
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("objective", ["policy_gradient", "nll"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss_weight", cells.WEIGHTS)
def test_the_loss_of_a_window_is_the_weighted_sum_over_its_micro_batches(loss_weight, reduction, objective):
    wanted = scenario(loss_weight, reduction, objective)
    model, layout, passes = wanted.build().double(), wanted.layout(), wanted.batches()
    windows = windows_of(passes, wanted.settings)
    assert [window.open for window in windows] == [False, False, False, True]
    for window in windows:
        found, _ = window_loss(model, layout, window, wanted.settings)
        torch.testing.assert_close(found, by_definition(model, passes, window, wanted.settings), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("boundary", ["rollouts", "caller"])
@pytest.mark.parametrize("section", OWN)
def test_losses_that_bring_weights_or_are_divided_come_to_the_same(section, boundary):
    wanted = of_section({**section, "boundary": boundary})
    model, layout, passes = wanted.build().double(), wanted.layout(), wanted.batches()
    for window in windows_of(passes, wanted.settings):
        found, _ = window_loss(model, layout, window, wanted.settings)
        torch.testing.assert_close(found, by_definition(model, passes, window, wanted.settings), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("across", ["sum", "mean"])
def test_losses_that_their_caller_divides_by_the_tokens_make_the_step_of_tokens(across):
    """Whatever became of the ranks: the definition of both is the mean over the window's tokens."""
    divided = of_section({"loss_weight": "divided", "across_ranks": across})
    by_tokens = of_section({"loss_weight": "token"})
    model, layout = by_tokens.build().double(), by_tokens.layout()
    assert layout == divided.layout()
    windows = [windows_of(one.batches(), one.settings) for one in (divided, by_tokens)]
    for own, right in zip(*windows, strict=True):
        found, _ = window_loss(model, layout, own, divided.settings)
        torch.testing.assert_close(
            found, window_loss(model, layout, right, by_tokens.settings)[0], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("loss_weight", cells.WEIGHTS)
def test_the_gradient_of_a_window_is_the_weighted_sum_of_its_micro_batches_gradients(loss_weight):
    wanted = scenario(loss_weight)
    model, layout, passes = wanted.build().double(), wanted.layout(), wanted.batches()
    window = windows_of(passes, wanted.settings)[0]
    parts = [
        weight(batch, loss_weight) / window.total * gradient(model(**batch.inputs), model)
        for row in passes[window.first : window.last + 1]
        for batch in row
        if batch.rollouts
    ]
    assert len(parts) > 2
    whole = gradient(window_loss(model, layout, window, wanted.settings)[0], model)
    assert whole.norm() > 1e-3
    torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-12, atol=1e-12)


def test_a_window_of_idle_passes_has_no_loss():
    wanted = scenario("rollout")
    window = PlannedWindow(first=0, last=0, expected=8.0, total=0.0, open=True, progress=0)
    assert window_loss(wanted.build().double(), (((), ()),), window, wanted.settings) == (None, {})


def test_a_run_writes_the_definitions_loss_and_the_norm_of_its_gradient_for_every_window():
    wanted = scenario("token")
    passes, lines = wanted.batches(), []
    train_alone(wanted, lambda line, module: lines.append(line))
    windows = windows_of(passes, wanted.settings)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert [line.total for line in lines] == [window.total for window in windows]
    model = wanted.build().double()
    loss = by_definition(model, passes, windows[0], wanted.settings)
    assert lines[0].loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert lines[0].grad_norm == pytest.approx(float(gradient(loss, model).norm()), rel=1e-12)
