"""Subjects by their names: each leads to a function, and what one raises is an answer and ends nothing."""

import pytest

from ds_parity.parity.running.tasks import attempted, engine_of
from ds_parity.parity.subjects import candidate
from ds_parity.parity.subjects.controls.boundary.late_boundary import LateBoundary
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references import alone, fixed, hand_driven


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ds_parity", candidate.run),
        ("deepspeed", fixed.run_with_fixed_steps),
        ("deepspeed-loop", hand_driven.drive_by_hand),
        ("torch", alone.train_alone),
        ("clean", Loop.run),
        ("late-boundary", LateBoundary.run),
    ],
)
def test_an_engine_is_found_by_the_name_that_its_traces_have(name, function):
    assert engine_of(name) == function


def test_there_is_no_engine_of_another_name():
    with pytest.raises(KeyError, match="nonsense"):
        engine_of("nonsense")


def test_what_an_action_returns_or_raises_is_an_answer():
    assert attempted(lambda: {"peaks": [1]}) == {"peaks": [1]}
    assert attempted(lambda: {}["absent"]) == {"raised": "KeyError: 'absent'"}
