"""Settings of parameter groups, as checkpoints of pipelines keep them to be compared: alike where they count alike."""

import dataclasses
import enum
import fractions
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ds_parity.engine.pipeline_checkpoints import _in_words, _of_numbers, _settings


class Policy:
    """Anything."""


class Kind(enum.Enum):
    """One of two."""

    SLOW, FAST = 1, 2


@dataclasses.dataclass
class Plan:
    """Has numbers."""

    steps: int


@dataclasses.dataclass(slots=True)
class Narrow:
    """Has no `__dict__`."""

    steps: int


ALIKE = [
    (0, 0.0),
    (0.0, -0.0),
    (False, 0),
    (0.01, np.float64(0.01)),
    (0.5, np.array(0.5)),
    (0.5, torch.tensor(0.5)),
    ((0.9, 0.99), [0.9, 0.99]),
    (Policy(), Policy()),
    (float("nan"), float("nan")),
    ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}),
    ({1, 2}, {2, 1}),
    (0.1, Decimal("0.1")),
    (Kind.FAST, Kind.FAST),
    (Plan(1), Plan(1)),
    (Narrow(1), Narrow(1.0)),
    (torch.Tensor, torch.Tensor),
]
APART = [
    (0.1, 0.2),
    (np.array(0.1), np.array(0.2)),
    (torch.tensor(0.1), torch.tensor(0.2)),
    (torch.float32, torch.bfloat16),
    (Decimal("0.1"), Decimal("0.2")),
    (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    (1j, 2j),
    ({"a": 0.1}, {"a": 0.2}),
    ({1}, {2}),
    (range(3), range(4)),
    ("a", "b"),
    (None, 0),
    (10**400, 10**401),
    (2**53, 2**53 + 1),
    (Kind.SLOW, Kind.FAST),
    (Plan(1), Plan(2)),
    (Narrow(1), Narrow(2)),
    (Plan(1), Narrow(1)),
    (np.float32, np.float64),
    (Decimal("sNaN"), Decimal(1)),
    (len, max),
    (torch.Tensor.add, torch.Tensor.mul),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_counts_alike_has_the_same_words(one, other):
    assert _in_words(one) == _in_words(other)


@pytest.mark.parametrize(("one", "other"), APART)
def test_what_counts_otherwise_has_other_words(one, other):
    assert _in_words(one) != _in_words(other)


def test_a_count_of_steps_is_no_setting():
    groups = [{"params": [], "lr": 0.1, "lr_scale": 2, "name": "a", "step": 3}]
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    assert _settings(engine) == [{"lr": "0.1", "lr_scale": "2.0"}]


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(1), np.array(1.0), torch.tensor(1.0), (1, 2.0), Decimal(1)])
def test_numbers_count_whatever_their_name(value):
    assert _of_numbers(value)


@pytest.mark.parametrize("value", ["a", None, [], ["a"], torch.ones(2), np.ones(2), Policy(), {"a": 1}])
def test_labels_do_not(value):
    assert not _of_numbers(value)
