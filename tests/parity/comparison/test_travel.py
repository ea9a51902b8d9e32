"""In bf16 and fp16 weights are held to the way that they have come from the start, and not to their norm alone."""

import math

import numpy as np
import pytest

from ds_parity.parity.comparison.bounds import DRIFT, EPS, TURN, C, Tier, stored_rounding
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.comparison.verdicts import verdict_of
from ds_parity.trace import Start, Trace, Weights
from tests.parity.comparison.comparing import HEADER, on_disk, record

REASSOCIATED = Tier.REASSOCIATED
SIZE = 8  # weights of these models; the sketch of one is it itself, times the root of this number
STEPS, LENGTH = 40, 0.0002


def told(vector):
    return {"norm": float(np.linalg.norm(vector)), "sketch": tuple((math.sqrt(SIZE) * vector).tolist())}


def run(*vectors, start=True, dtype="fp32", **header):
    """A trace of weights: the first where they start, the others after each step."""
    begins = Start(**told(vectors[0]), dtype=dtype) if start else None
    line = HEADER.model_copy(update={"start": begins, "optimizer": "SGD", "dtype": "bf16", **header})
    after = [Weights(checksum="a" * 64, **told(one)) for one in vectors[1:]]
    return Trace(line, tuple(record(step, weights=one) for step, one in enumerate(after, 1)))


def way(length=LENGTH, along=0, steps=STEPS, turned=None):
    """Weights of norm 1 that go straight on; from the step `turned` on, at a right angle to that."""
    at = [np.eye(SIZE)[-1]]
    for step in range(1, steps + 1):
        axis = along + 1 if turned is not None and step >= turned else along
        at.append(at[-1] + length * np.eye(SIZE)[axis])
    return at


RIGHT = way()
STILL = [RIGHT[0]] * (STEPS + 1)


def differing(a, b, dtype="bf16"):
    return sorted({it.field for it in compare(a, b, REASSOCIATED, dtype).differences})


@pytest.mark.parametrize("dtype", DRIFT)
def test_weights_that_never_move_are_found_in_a_type_whose_old_bound_is_wider_than_the_way(dtype):
    assert C[dtype]["weights"] * EPS[dtype] * math.sqrt(4) > LENGTH
    assert differing(run(*RIGHT), run(*STILL), dtype) == ["weights"]


def test_without_a_start_they_are_not_and_the_verdict_says_that_it_proves_little():
    comparison = compare(run(*RIGHT, start=False), run(*STILL, start=False), REASSOCIATED, "bf16")
    assert comparison.equal
    (why,) = comparison.proves_little
    assert "weights that never moved would be equal too, which proves little; compare two runs in fp32" in why
    assert verdict_of(comparison, comparison).startswith(
        "equal but for rounding, but this proves little: training moved"
    )


def test_where_the_signal_is_above_the_bound_nothing_is_said_of_little():
    assert compare(run(*RIGHT), run(*RIGHT), REASSOCIATED, "bf16").proves_little == ()
    assert compare(run(*RIGHT), run(*RIGHT), REASSOCIATED, "fp32").proves_little == ()


@pytest.mark.parametrize(
    ("factor", "equal"), [(1.0, True), (1 + 0.7 * DRIFT["bf16"], True), (1 + 2 * DRIFT["bf16"], False)]
)
def test_a_gradient_of_another_length_is_found_where_it_is_more_than_bf16_makes_it(factor, equal):
    assert compare(run(*RIGHT), run(*way(LENGTH * factor)), REASSOCIATED, "bf16").equal is equal


def test_a_single_late_update_in_another_direction_is_found():
    assert differing(run(*RIGHT), run(*way(turned=STEPS - 2))) == ["weights"]


@pytest.mark.parametrize(("optimizer", "equal"), [("SGD", False), ("AdamW", True), (None, True)])
def test_an_optimizer_that_divides_by_the_gradients_size_may_turn_a_part_of_each_step(optimizer, equal):
    rng = np.random.default_rng(0)
    turned = [one + np.append(0.3 * TURN * LENGTH * rng.standard_normal(SIZE - 1), 0) for one in RIGHT[1:]]
    assert compare(run(*RIGHT, optimizer=optimizer), run(RIGHT[0], *turned), REASSOCIATED, "bf16").equal is equal


def test_weights_that_a_trace_tells_of_in_bf16_may_be_off_by_their_rounding():
    rng = np.random.default_rng(1)
    rounded = [one + EPS["bf16"] / math.sqrt(12) / math.sqrt(SIZE) * rng.choice([-1, 1], SIZE) for one in RIGHT[1:]]
    assert compare(run(*RIGHT), run(RIGHT[0], *rounded, dtype="bf16"), REASSOCIATED, "bf16").equal
    assert differing(run(*RIGHT), run(RIGHT[0], *rounded)) == ["weights"]


def test_a_trace_that_does_not_say_its_type_tells_of_weights_in_that_of_the_run():
    known, unknown = run(*RIGHT).header, run(*RIGHT, start=False).header
    assert stored_rounding(known, known, "bf16") == 0
    assert stored_rounding(known, unknown, "bf16") > 0
    assert stored_rounding(unknown, unknown, "fp32") == 0


def test_no_bound_is_wider_than_it_was():
    for dtype in EPS:
        for vectors in (RIGHT, way(1.0)):
            pairs = zip(
                compare(run(*vectors), run(*vectors), REASSOCIATED, dtype).measured,
                compare(run(*vectors, start=False), run(*vectors, start=False), REASSOCIATED, dtype).measured,
                strict=True,
            )
            assert all(with_start.bound <= without.bound for with_start, without in pairs)


def test_a_file_is_judged_as_the_trace_in_memory(tmp_path):
    pair = run(*RIGHT), run(*way(turned=20))
    files = [on_disk(tmp_path / side, it) for side, it in zip("ab", pair, strict=True)]
    assert repr(compare(*files, REASSOCIATED, "bf16")) == repr(compare(*pair, REASSOCIATED, "bf16"))
    assert len(compare(*pair, REASSOCIATED, "bf16").differences) > 1


def test_steps_without_weights_and_weights_that_are_not_finite_are_no_way():
    holes = [None if step % 3 else one for step, one in enumerate(run(*RIGHT).steps)]
    kept = tuple(one or record(step, weights=None) for step, one in enumerate(holes, 1))
    reference = Trace(run(*RIGHT).header, kept)
    assert compare(reference, reference, REASSOCIATED, "bf16").equal
    nan = run(*RIGHT[:5], np.full(SIZE, math.nan), *RIGHT[6:])
    assert differing(nan, nan) == ["weights"]


def test_runs_that_start_from_other_weights_are_said_to():
    other = run(RIGHT[0] * 1.001, *RIGHT[1:])
    said = "the runs start from other weights: they lie 0.001 of the reference's norm apart before the first step"
    assert said in compare(run(*RIGHT), other, REASSOCIATED, "bf16").notes
    assert not [it for it in compare(run(*RIGHT), run(*RIGHT), REASSOCIATED, "bf16").notes if "start" in it]


def test_a_gradient_whose_rollouts_cancel_is_as_exact_as_those_of_other_windows():
    first = RIGHT[0] + 0.02 * LENGTH * np.eye(SIZE)[0]
    off = first + 0.02 * LENGTH * np.eye(SIZE)[1]
    rest = [it - RIGHT[1] for it in RIGHT[2:]]
    pair = [run(RIGHT[0], it, *(it + more for more in rest), start=True) for it in (first, off)]
    assert differing(*pair) == ["weights"]
    small = [Trace(it.header, (it.steps[0].model_copy(update={"grad_norm": 0.04}), *it.steps[1:])) for it in pair]
    assert differing(*small) == []
