"""The checksum of the order in which gradients come: it must tell orders apart, and must not alarm where none is."""

from types import SimpleNamespace

import pytest

from ds_parity.engine.internals.zero import Zero


class Hooked(Zero):
    """Notes as where hooks reduce, without an engine."""

    _reduced_once = False
    groups = None

    def __init__(self, parameters=300):
        self._trained = [SimpleNamespace() for _ in range(parameters)]
        self.engine = SimpleNamespace(optimizer=SimpleNamespace(clear_backward_seen_flag=lambda: None))

    def _note(self, number):
        super()._note(number)
        self._note_order(number)


def used(*numbers, noting=None):
    """The checksum of a window of one backward in which gradients come in this order."""
    noting = noting or Hooked()
    for number in numbers:
        noting._note(number)
    noting.end_backward()
    return noting.used_parameters()


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 1), (1, 0)), ((0, 1, 256), (256, 0, 1)), ((1, 257), (257, 1)), ((0, 1, 2), (0, 1))],
)
def test_another_order_and_another_set_have_another_checksum(one, other):
    assert used(*one) == used(*one)
    assert used(*one) != used(*other)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_parts_of_a_tiled_computation_are_one_gradient(parts):
    """DeepSpeed reduces behind the last part, of which ranks may have other numbers."""
    noting = Hooked()
    noting._note(0)
    for part in range(parts):
        noting._trained[1].ds_grad_is_ready = part == parts - 1
        noting._note(1)
    assert used(2, noting=noting) == used(0, 1, 2)


@pytest.mark.parametrize("once", [False, True])
def test_a_window_that_has_run_nothing_has_no_order_of_the_last_one(once, monkeypatch):
    monkeypatch.setattr(Hooked, "_reduced_once", once)
    noting = Hooked()
    used(1, 0, noting=noting)
    noting.begin_window()
    assert noting.used_parameters() == Hooked().used_parameters()
