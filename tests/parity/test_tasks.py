"""Subjects by their names: each leads to a function, and what one raises is an answer and ends nothing."""

from dataclasses import replace

import pytest

from ds_parity.errors import ConfigError
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.running.tasks import attempted, engine_of, run_scenario
from ds_parity.parity.subjects import candidate
from ds_parity.parity.subjects.controls.boundary.late_boundary import LateBoundary
from ds_parity.parity.subjects.controls.loop import Loop
from ds_parity.parity.subjects.references import alone, fixed, hand_driven
from tests.distributed import cells


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


def test_a_training_function_that_takes_no_step_is_refused_with_what_it_must_do(tmp_path):
    scenario = Scenario("untrained", cells.config(2, loss_weight="token"), train="tests.parity.training:nothing")
    with pytest.raises(ConfigError, match=r"^train 'tests\.parity\.training:nothing' returned without an optimizer st"):
        run_scenario(scenario.to_json(), "torch", str(tmp_path))
    trains = replace(scenario, train="tests.parity.training:nll", **cells.TINY)
    assert run_scenario(trains.to_json(), "torch", str(tmp_path))["accelerator"]
