"""Faults that the diagnosis was not written for: what each says of itself."""

import pytest

from ds_parity.parity.subjects.controls.known import known
from ds_parity.parity.subjects.controls.loop import Loop
from tests.hard.blind_faults import ALL, half

KINDS = {"data", "loss", "gradient", "clipping", "optimizer settings", "schedule", "weights", "logging"}


def test_there_are_enough_of_every_kind_in_two_halves_of_about_one_size():
    assert len(ALL) >= 60
    assert {fault.kind for fault in ALL.values()} == KINDS
    assert 0.4 < sum(map(half, ALL)) / len(ALL) < 0.6


@pytest.mark.parametrize("name", ALL)
def test_a_fault_says_what_is_wrong_and_is_no_control(name):
    fault = ALL[name]
    assert issubclass(fault, Loop)
    assert fault.name == name
    assert name not in known()
    assert fault.truth.endswith(".")
    assert len(fault.truth.split()) >= 4
