"""A few numbers of all weights, from which the distance of two models follows."""

import math

import pytest
import torch

from ds_parity.parity.running.weights import summary
from ds_parity.sketches import WIDTH, sketch_of, start_of


def distance(a, b):
    return math.dist(a, b) / math.sqrt(WIDTH)


def mixed(number):
    """Steele, Lea and Flood's splitmix64 in plain integers."""
    mask = 2**64 - 1
    z = number * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_each_weight_is_added_to_one_number_with_a_sign_that_any_machine_draws_alike():
    for place in (0, 1, 77, 300_000):
        one = torch.zeros(300_001)
        one[place] = 1.0
        drawn = mixed(place + 1)
        expected = [0.0] * WIDTH
        expected[drawn % WIDTH] = math.sqrt(WIDTH) * (1 - 2 * (drawn >> 32 & 1))
        assert sketch_of([one]) == tuple(expected)


def test_it_does_not_depend_on_how_the_weights_are_cut():
    vector = torch.randn(500_000, generator=torch.Generator().manual_seed(0))
    whole = sketch_of([vector])
    parts = sketch_of([vector[:1], vector[1:300_001], vector[300_001:]])
    assert parts == pytest.approx(whole, rel=1e-9)


def test_the_distance_of_two_vectors_follows_within_its_error():
    generator = torch.Generator().manual_seed(1)
    errors = []
    for size in (1e-6, 1e-3, 1.0) * 20:
        a = torch.randn(20_000, dtype=torch.float64, generator=generator)
        moved = torch.randn(20_000, dtype=torch.float64, generator=generator) * size
        found = distance(sketch_of([a]), sketch_of([a + moved]))
        errors.append(found / float(moved.norm()) - 1)
    assert abs(sum(errors) / len(errors)) < 0.05
    assert max(map(abs, errors)) < 4 / math.sqrt(2 * WIDTH)


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")]
)
def test_the_start_is_that_of_the_weights_and_says_their_type(dtype, said):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 3)).to(dtype)
    start = start_of(model)
    vector = torch.cat([it.detach().flatten().float() for it in model.parameters()])
    assert start.dtype == said
    assert start.norm == pytest.approx(summary(vector).norm, rel=1e-6)
    assert start.sketch == pytest.approx(summary(vector).sketch, rel=1e-4, abs=1e-6)
