"""Rates, updates, norms and losses of 0, and runs of one step: nothing is divided by them."""

import math
import random
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from ds_parity.trace import Header, StepRecord, Trace, Weights
from ds_parity.trace.records import Start

NUMBERS = 16
SOME = st.sampled_from([0.0, 1e-300, 0.5, 2.0])
STEP = st.fixed_dictionaries(
    {
        "loss": SOME,
        "lr": SOME,
        "grad_norm": SOME,
        "total": SOME,
        "update": st.sampled_from([0.0, 0.0, 1.0]),
        "passes": st.integers(0, 3),
        "tokens": st.integers(0, 2),
    }
)
SIDES = st.lists(st.tuples(STEP, STEP), min_size=1, max_size=4)


def weights(sketch):
    return Weights(checksum=sha256(repr(sketch).encode()).hexdigest(), norm=math.hypot(*sketch), sketch=tuple(sketch))


def run(steps, *, begin=1.0, optimizer="SGD", told=False):
    """A run from weights that are all one number, whose updates are so many times a direction of their own."""
    place, directions, records = [begin] * NUMBERS, random.Random(0), []
    start = Start(norm=math.hypot(*place), sketch=tuple(place), dtype="fp32") if told else None
    for at, of_step in enumerate(steps, 1):
        figures = {name: of_step[name] for name in ("loss", "grad_norm", "total", "passes", "tokens")}
        place = [it + of_step["update"] * directions.gauss(0, 1) for it in place]
        counts = {"idle_passes": 0, "rollouts": 4, "prompts": 4}
        records.append(StepRecord(step=at, lr=(of_step["lr"],), weights=weights(place), **counts, **figures))
    header = Header(
        scenario=None, seed=0, versions={}, device="cpu", ranks=2, config_hash="a", engine="loop",
        optimizer=optimizer, start=start,
    )  # fmt: skip
    return Trace(header, tuple(records))


@given(
    SIDES, st.sampled_from([0.0, 1.0]), st.sampled_from(["SGD", "AdamW", None]), st.booleans(),
    st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_numbers_of_nothing_are_no_error(sides, begin, optimizer, told, dtype):
    a = run([one for one, _ in sides], optimizer=optimizer, told=told)
    b = run([other for _, other in sides], begin=begin, optimizer=optimizer, told=told)
    found = compare(a, b, Tier.REASSOCIATED, dtype)
    assert found.equal or diagnose(a, b, found).certain


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_updates_of_nothing_do_not_measure_how_far_weights_lie_apart(rate):
    still = [{"loss": 1.0, "lr": rate, "grad_norm": 1.0, "total": 8.0, "passes": 1, "tokens": 40, "update": 0.0}] * 6
    other = [{**it, "loss": 1.2} for it in still]
    a, b = run(still), run(other, begin=1.1)
    assert diagnose(a, b, compare(a, b, Tier.REASSOCIATED)).causes == ()
