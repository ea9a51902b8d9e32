"""What is computed for many steps at once is what each step by itself comes to."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from ds_parity.parity.comparison.blocks import Block
from ds_parity.parity.comparison.bounds import EPS, Tier, gap
from ds_parity.parity.comparison.bounds import signed as signed_alone
from ds_parity.parity.comparison.judge import judge, signed
from ds_parity.parity.comparison.rows import row
from ds_parity.parity.comparison.ruler import Ruler
from ds_parity.trace.columns import Columns
from tests.parity.comparison.comparing import record, two_traces, weights

BOTH = pytest.mark.parametrize("tier", list(Tier))
FIGURES = (0.0, -0.0, 1.0, math.nextafter(1.0, 2), -3.0, 1e-200, 1e200, 5e-324, 1e308, math.inf, -math.inf, math.nan)


def ruler(tier):
    return Ruler(tier, "fp32", EPS["fp32"], {"loss": 0.5, "metrics.x": 0.25}, frozenset(), {})


def block(a, b):
    return Block([it.step for it in a], [4 * at for at in range(len(a))], Columns.of(a), Columns.of(b))


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_signed_differences(floor):
    pairs = list(product(FIGURES, FIGURES))
    found = signed(*np.array(pairs).T, floor)
    assert found.tolist() == pytest.approx([signed_alone(a, b, floor) for a, b in pairs], rel=0, abs=0, nan_ok=True)


def test_distances_of_weights_however_great_or_small_they_are():
    held = [weights(norm, (x, y)) for norm in (1.0, 0.0, 1e-200, math.inf, -1.0) for x, y in product(FIGURES, FIGURES)]
    others = [weights(it.norm, (it.sketch[0], 1e200)) for it in held] + [weights(2.0, it.sketch[::-1]) for it in held]
    a, b = ([record(at, weights=it) for at, it in enumerate(side, 1)] for side in (held * 2, others))
    found = judge(block(a, b), ruler(Tier.REASSOCIATED))["weights"]
    alone = [gap(x.weights, y.weights) for x, y in zip(a, b, strict=True)]
    assert found.gap.tolist() == pytest.approx(alone, rel=1e-12, abs=0, nan_ok=True)


@BOTH
@settings(max_examples=100, deadline=None)
@given(two_traces(most=5))
def test_the_fields_that_differ_in_each_step(tier, traces):
    both = [(a, b) for a in traces[0].steps for b in traces[1].steps if a.step == b.step]
    if not both:
        return
    together = block(*zip(*both, strict=True))
    found = judge(together, ruler(tier))
    for at in range(len(both)):
        alone = row(together.pair(at), ruler(tier))
        assert {name for name, it in found.items() if it.differs[at]} == {it.field for it in alone.differences}
        for name in ("loss", "lr", "grad_norm", "weights"):
            apart = getattr(alone, name)
            assert found[name].known[at] == (apart is not None)
            assert apart is None or found[name].gap[at] == pytest.approx(apart, rel=1e-12, abs=0, nan_ok=True)
