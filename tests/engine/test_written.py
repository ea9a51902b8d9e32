"""Values of gradients are compared with those that were noted, on a CPU at once and elsewhere at a window's end."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from ds_parity.engine.internals import written
from ds_parity.engine.internals.written import Samples


@pytest.fixture
def gradients():
    return [
        torch.arange(1.0, 41.0),
        torch.full((3, 5), torch.nan),
        torch.ones(4, 6, dtype=torch.bfloat16).t(),
        torch.tensor(0.5),
        torch.empty(0),
    ]


@pytest.fixture
def noted(gradients):
    one = Samples(SimpleNamespace(dense_gradients=lambda: gradients))
    one.note()
    return one


def test_what_is_as_it_was_does_not_differ_not_even_a_nan(noted):
    assert not noted.differ(ends=True)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda g: g.fill_(7)])
def test_a_write_to_one_of_them_differs(noted, gradients, place, write):
    write(gradients[place].data)
    assert noted.differ(ends=False)


def test_other_memory_behind_a_gradient_is_read(noted, gradients):
    gradients[0].data = torch.zeros(40)
    assert noted.differ(ends=False)


def test_a_gradient_that_is_gone_differs(noted, gradients):
    gradients.pop()
    gradients.pop()
    assert noted.differ(ends=False)
    gradients.clear()
    assert noted.differ(ends=False)


def test_nothing_differs_where_nothing_was_noted_or_it_was_forgotten(noted, gradients):
    assert not Samples(SimpleNamespace(dense_gradients=lambda: gradients)).differ(ends=True)
    gradients[0].data.zero_()
    noted.forget()
    assert not noted.differ(ends=True)


def test_an_accelerator_is_asked_at_the_end_for_what_differed_before(noted, gradients, monkeypatch):
    monkeypatch.setattr(written, "_AT_ONCE", ())
    gradients[0].data.mul_(2)
    assert not noted.differ(ends=False)
    noted.note()  # a backward has added to it
    assert noted.differ(ends=True)
    noted.forget()
    noted.note()
    assert not noted.differ(ends=True)


def test_gradients_on_another_device_differ(noted, gradients):
    gradients[:] = [g.to("meta") for g in gradients]
    assert noted.differ(ends=False)


def test_an_accelerator_is_asked_where_nothing_is_left_to_compare(noted, gradients, monkeypatch):
    """ZeRO 1 takes the gradients away in the boundary's backward."""
    monkeypatch.setattr(written, "_AT_ONCE", ())
    gradients[0].data.mul_(2)
    assert not noted.differ(ends=False)
    gradients.clear()
    noted.note()
    assert not noted.differ(ends=False)
    assert noted.differ(ends=True)


def test_a_write_that_spares_the_first_values_differs(noted, gradients):
    gradients[0].data[20:] = 0
    assert noted.differ(ends=False)


def test_no_gradient_is_kept_alive(noted, gradients):
    there = weakref.ref(gradients[0].untyped_storage())
    gradients.clear()
    assert there() is None
