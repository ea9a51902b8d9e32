"""The memory of a window: what is kept in it shows, what was there before doesn't."""

import torch

from ds_parity.parity.memory import Peaks

KEPT = torch.nn.Linear(100, 100, bias=False)


def window(size):
    """Hold `size` fp32 numbers at most, beside what comes and goes."""
    held = torch.zeros(size)
    for _ in range(3):
        torch.ones(10) + 1
    return held.sum()


def test_a_window_is_measured_between_two_steps_and_at_most_two_are():
    peaks = Peaks()
    for _ in range(6):
        peaks.before(KEPT)
        outside = torch.zeros(1_000_000)  # what a recorder takes between two windows
        del outside
        peaks.after(KEPT)
        window(50_000)
    peaks.end()
    assert len(peaks.bytes) == 2
    assert all(200_000 <= peak < 210_000 for peak in peaks.bytes)
    assert peaks.parameters == 10_000


def test_a_copy_that_is_kept_shows():
    alone, copied = Peaks(), Peaks()
    for peaks in (alone, copied):
        for _ in range(2):
            peaks.before(KEPT)
            peaks.after(KEPT)
            copy = torch.zeros(10_000) if peaks is copied else None
            window(50_000)
            del copy
        peaks.end()
    assert copied.bytes[0] - alone.bytes[0] == 40_000


def test_activations_of_the_passes_hide_no_copy_that_a_step_makes():
    """In the peak of the whole window a second copy of a small model's gradients is not to be seen."""
    alone, copying = Peaks(), Peaks()
    for peaks in (alone, copying):
        weight = torch.nn.Parameter(torch.ones(1000))
        for _ in range(2):
            peaks.before(KEPT)
            peaks.after(KEPT)
            (torch.ones(300, 1000) * weight).exp().sum().backward()
            copy = weight.grad.clone() if peaks is copying else None
            weight.data.sub_(weight.grad)
            del copy
        peaks.end()
    assert 3990 < copying.bytes[0] - alone.bytes[0] <= 4000  # scalars of the graph are freed before the copy is made
    assert alone.bytes[0] < 300_000
