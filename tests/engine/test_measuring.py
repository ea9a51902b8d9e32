"""Measuring what a micro-batch costs leaves the model as it was, and sees what a pass takes."""

from types import SimpleNamespace

import pytest
import torch

import ds_parity
from ds_parity.engine import measuring
from ds_parity.errors import ConfigError, WindowError


@pytest.fixture
def clock(monkeypatch):
    """A clock that models move, so that what else the machine does is in no time."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


class Slow(torch.nn.Module):
    """Takes 20 microseconds a token and 50 nanoseconds a pair of tokens of one rollout, and draws random numbers."""

    def __init__(self, clock=None):
        super().__init__()
        self.clock = clock or SimpleNamespace(seconds=0.0)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, lengths):
        self.clock.seconds += 0.003 + sum(20e-6 * length + 50e-9 * length**2 for length in lengths)
        drawn = torch.nn.functional.dropout(torch.randn(4, 3))
        return (self.norm(drawn) * self.weight).sum()


def lengths_of(one):
    return [len(rollout.tokens) for rollout in one.held]


def loss(model, one):
    return model(lengths_of(one))


def batch(*lengths, layout="packed"):
    return ds_parity.collate([ds_parity.Rollout("p", (7,) * length, 1) for length in lengths], layout=layout)


MADE = [batch(800), batch(100), batch(*[100] * 8), batch(400, 400), batch(1200)]


def test_what_a_pass_takes_is_found_and_the_model_is_as_it_was(clock):
    model = Slow(clock)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    cost = ds_parity.measure_cost(model, MADE, loss, repeats=3)
    assert (cost.per_token, cost.per_square, cost.per_pass) == pytest.approx((20e-6, 50e-9, 0.003), rel=1e-6)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_median_counts_and_the_first_run_does_not(clock):
    late = iter([5.0, *[0.0] * 8, 7.0, *[0.0] * 100])

    def sometimes_late(model, one):
        clock.seconds += next(late)
        return loss(model, one)

    cost = ds_parity.measure_cost(Slow(clock), MADE, sometimes_late, repeats=3)
    assert (cost.per_token, cost.per_square, cost.per_pass) == pytest.approx((20e-6, 50e-9, 0.003), rel=1e-6)


def test_a_padded_row_is_as_long_as_the_longest(clock):
    seen = []
    padded = [batch(10, 30, layout="padded"), batch(10, layout="padded"), batch(50, layout="padded")]

    def waits(model, one):
        seen.append(one)
        rows, longest = one.inputs["input_ids"].shape
        clock.seconds += rows * (200e-6 * longest + 5e-6 * longest**2)
        return model.weight.sum()

    cost = ds_parity.measure_cost(Slow(), padded, waits, repeats=2)
    assert len(seen) == 9
    assert (cost.per_token, cost.per_square) == pytest.approx((200e-6, 5e-6))


@pytest.mark.parametrize(("given", "options"), [(MADE[:2], {}), (MADE, {"repeats": 0})])
def test_too_little_is_refused(given, options):
    with pytest.raises(ConfigError, match="at least three"):
        ds_parity.measure_cost(Slow(), given, loss, **options)


def test_micro_batches_of_one_make_up_are_refused_before_any_is_timed():
    def untimed(model, one):
        raise AssertionError("a micro-batch was run")

    with pytest.raises(ConfigError, match="all 3 micro-batches are of one make-up"):
        ds_parity.measure_cost(Slow(), [batch(800), batch(800), batch(800, 800)], untimed)


def test_a_micro_batch_of_no_rollouts_is_refused():
    with pytest.raises(ConfigError, match="holds no rollouts"):
        ds_parity.measure_cost(Slow(), [*MADE, ds_parity.collate([])], loss)


def test_divided_parameters_are_refused():
    model = Slow()
    model.weight.ds_id = 1  # as ZeRO 3 marks them
    with pytest.raises(WindowError, match=r"divided over ranks \(ZeRO 3\).*Cost.of_model"):
        ds_parity.measure_cost(model, MADE, loss)
