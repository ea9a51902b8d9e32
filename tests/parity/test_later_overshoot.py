"""A surplus that is carried on, or dropped, from a later step on: it is named beside a target that fits by chance."""

import pytest

from tests.parity.test_window_faults import cut, named, stream

DUE = [
    (21, 4), (23, 4), (21, 3), (26, 4), (25, 4), (26, 4), (24, 4), (25, 4), (24, 4), (21, 3), (22, 3), (24, 4), (23, 4),
    (6, 1),
]  # fmt: skip
LATER = [
    *DUE[:5], (18, 3), (21, 3), (22, 4), (14, 2), (24, 4), (21, 3), (22, 3), (18, 3), (17, 3), (18, 3),
]  # fmt: skip


def test_a_surplus_that_is_carried_on_later_is_named_beside_another_target():
    assert named(DUE, LATER, ranks=4, idle=0) == [{"another-target", "another-overshoot"}]


@pytest.mark.parametrize("target", [8, 12, 14, 20, 24])
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("name", ["few", "many", "odd"])
def test_another_target_is_no_surplus_that_is_treated_otherwise_later(name, carried, target):
    held = stream(name, passes=200)
    groups = named(cut(held, carried=carried), cut(held, target, carried=carried))
    assert "another-target" in groups[0]
    assert not any("another-overshoot" in group for group in groups)


@pytest.mark.parametrize("name", ["few", "many", "odd"])
def test_a_surplus_that_is_dropped_from_a_later_step_on_is_never_another_target_alone(name):
    for seed in range(8):
        held = stream(name, seed=seed)
        before = cut(held)[:5]
        own = before + cut(held[sum(passes for _, passes in before) :], carried=False)
        assert {"another-target"} not in named(cut(held), own)
