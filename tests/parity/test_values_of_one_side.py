"""A value that one side alone has, in some steps or in all, is no difference of training, and excludes nothing."""

import math

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import diagnose
from tests.parity.comparison.comparing import on_disk
from tests.parity.test_forgotten_lengths import RATE, STEPS, found, run
from tests.parity.test_logged_counts import OTHER_SPLIT
from tests.parity.test_open_classes import rewritten

# The first step in which something differs.
SINCE = 4


def halved(at, gradient):
    return gradient * (0.5 if at >= SINCE - 1 else 1.0)


FAULTS = {
    "gradient": lambda: run(scale=halved),
    "data": lambda: rewritten(run(), lambda step: {"loss": 9.0, "grad_norm": 3.0} if step >= SINCE else {}),
    "schedule": lambda: rewritten(
        run(rates=[RATE] * (SINCE - 1) + [RATE / 2] * (STEPS - SINCE + 1)),
        lambda step: {"lr": (RATE / 2,)} if step >= SINCE else {},
    ),
}
HOLES = {"grad_norm": None, "loss": None, "lr": None, "metrics": {}, "weights": None}
WHERE = {"the first step": range(1, 2), "all steps": range(1, STEPS + 1), "behind the fault": range(5, 6)}


def with_metrics(trace):
    return rewritten(trace, lambda step: {"metrics": {"kl": 0.01 * step}})


def without(trace, field, steps):
    return rewritten(trace, lambda step: {field: HOLES[field]} if step in steps else {})


@pytest.mark.parametrize("side", [pytest.param("reference", marks=pytest.mark.slow), "candidate"])
@pytest.mark.parametrize(
    "where", [next(iter(WHERE)), *(pytest.param(it, marks=pytest.mark.slow) for it in list(WHERE)[1:])]
)
@pytest.mark.parametrize("field", HOLES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_of_one_side_excludes_no_class(fault, field, where, side):
    pair = with_metrics(run()), with_metrics(FAULTS[fault]())
    holes = [without(one, field, WHERE[where]) for one in pair]
    diagnosis = found(holes[0], pair[1]) if side == "reference" else found(pair[0], holes[1])
    # As where neither has it.
    both = found(*holes)
    assert diagnosis.classes == both.classes
    assert diagnosis.causes == both.causes
    steps = f"{len(WHERE[where])} step{'s' * (len(WHERE[where]) > 1)}"
    said = f"one side alone has {field} in {steps}, which is taken for no reason of what differs"
    assert diagnosis.certain[-1] == said


@pytest.mark.parametrize("lost", ["reference", "candidate"])
def test_a_loss_that_is_not_there_where_norms_part_does_not_tell_that_data_agree(lost):
    """Of the step in which the fault begins."""
    pair = [run(), FAULTS["data"]()]
    holes = [rewritten(one, lambda step: {"weights": None}) for one in pair]
    at = lost == "candidate"
    holes[at] = rewritten(holes[at], lambda step: {"loss": None} if step == SINCE else {})
    assert {"data", "weights"} <= set(found(*holes).classes)


COUNTS = ("rollouts", "total", "tokens", "passes")


@pytest.mark.parametrize("field", COUNTS)
def test_rates_that_are_rounded_are_no_cause_beside_a_hole(field):
    one = rewritten(run(), lambda step: {"lr": (0.001,)})
    other = rewritten(
        run(), lambda step: {"lr": (float(np.float32(0.001)),), **({"loss": 9.0, "grad_norm": 3.0} if step > 3 else {})}
    )
    diagnosis = found(one, rewritten(other, lambda step: {field: None} if step == 1 else {}))
    assert "reported-lr" not in {cause.name for cause in diagnosis.causes}
    assert any("the learning rates agree to fp32" in said for said in diagnosis.certain)


def test_passes_of_another_split_are_counted_without_the_hole():
    one = run()
    other = rewritten(
        one, lambda step: {"passes": None if step == 1 else 2, "loss": 9.0 if step > 3 else one.steps[step - 1].loss}
    )
    (said,) = [said for said in found(one, other).certain if OTHER_SPLIT in said]
    assert f"{STEPS - 1} windows of the same rollouts have another number of passes, from step 2 on" in said


@pytest.mark.parametrize("steps", [range(1, 2), range(2, 6, 2), range(1, STEPS + 1)])
@pytest.mark.parametrize("field", [name for name in HOLES if name != "loss"])
def test_where_nothing_else_differs_a_value_of_one_side_is_the_difference(field, steps):
    """Nor is any cause named by what is rounding in the others."""
    one = with_metrics(run())
    other = rewritten(one, lambda step: {"metrics": {"kl": 0.01 * step * (1 + 1e-9)}})
    for pair in ((one, without(other, field, steps)), (without(one, field, steps), other)):
        diagnosis = found(*pair)
        assert diagnosis.causes == ()
        assert diagnosis.classes == ("logging",)
        assert diagnosis.certain[0].startswith(f"first to differ, in step {steps[0]}")
        assert f"record {field} in both runs" in diagnosis.next


@pytest.mark.parametrize("lost", [1, SINCE + 1])
def test_a_file_and_a_trace_in_memory_tell_the_same(tmp_path, lost):
    sides = run(), rewritten(FAULTS["gradient"](), lambda step: {"grad_norm": None} if step == lost else {})
    files = [on_disk(tmp_path / name, one) for name, one in zip(("a", "b"), sides, strict=True)]
    told = [diagnose(*pair, compare(*pair, Tier.REASSOCIATED)) for pair in (sides, files)]
    assert told[0] == told[1]


@pytest.mark.parametrize("total", [math.nan, math.inf, -math.inf])
def test_a_total_that_is_not_finite_counts_no_passes(total):
    sides = [
        rewritten(run(), lambda step, own=own: {"passes": own, "total": total if own == 4 else 4.0, "loss": 1.0 * own})
        for own in (4, 2)
    ]
    assert found(*sides).classes


# Of unknown ranks: passes of each of them, idle ones and the total of both sides, and whether they are counted.
COUNTED = [
    ((4, 0, 8), (2, 0, 4), True),
    ((4, 3, 13), (2, 1, 7), True),
    ((1, 1, 1), (2, 0, 4), True),
    ((3, 3, 3), (2, 0, 4), True),
    ((4, 3, 12), (2, 1, 12), False),
]


@pytest.mark.parametrize(("one", "other", "counted"), COUNTED)
@pytest.mark.parametrize("known", [True, False])
def test_totals_that_count_passes_are_no_other_split(one, other, counted, known):
    ranks = (one[1] + one[2]) // one[0] if known else None
    sides = [
        rewritten(run(), lambda step, own=own: dict(zip(("passes", "idle_passes", "total"), own, strict=True)))
        for own in (one, other)
    ]
    sides[1] = rewritten(sides[1], lambda step: {"loss": 9.0})
    for side in sides:
        object.__setattr__(side, "header", side.header.model_copy(update={"ranks": ranks}))
    said = any(OTHER_SPLIT in sentence for sentence in found(*sides).certain)
    assert said is not counted
