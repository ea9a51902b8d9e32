"""The memory of a window: what is held in it shows, what was there before doesn't, whichever thread lets it go.

What the watch over a step finds on real engines, and that a copy shows there, is tested in tests/distributed.
"""

import threading

import pytest
import torch

from ds_parity.parity.running.memory import LiveBytes, Peaks

KEPT = torch.nn.Linear(100, 100, bias=False)


def test_what_is_born_counts_until_it_is_gone():
    with LiveBytes() as held:
        first = torch.zeros(1000)
        second = first + 1
        assert held.now == 8000
        del first
        assert held.now == 4000
        second = second.double()
        assert (held.now, held.peak) == (8000, 12_000)
    del second


def test_views_and_results_in_place_are_nothing_new():
    before = torch.zeros(1000)
    with LiveBytes() as held:
        before.add_(1).view(10, 100)[3:].mul_(2)
        assert held.peak == 0
        parts = before.clone().chunk(4)
        assert held.now == 4000
        del parts
        assert held.now == 0


def test_what_another_thread_lets_go_is_gone():
    """As a collective's thread does; the profiler that watched this one took it for kept."""
    with LiveBytes() as held:
        told, box = threading.Event(), [torch.zeros(1000)]
        thread = threading.Thread(target=lambda: (told.wait(), box.clear()))
        thread.start()
        assert held.now == 4000
        told.set()
        thread.join()
        assert held.now == 0


@pytest.mark.parametrize(("patience", "peak"), [(0.5, 4000), (0.0, 8000)])
def test_a_peak_that_goes_away_again_at_once_is_none(patience, peak):
    with LiveBytes() as held:
        box = [torch.zeros(1000)]
        held.patience = patience
        threading.Timer(0.05, box.clear).start()
        next_one = torch.zeros(1000)
        assert held.peak == peak
    del next_one


def test_a_window_is_measured_between_two_steps_and_at_most_two_are():
    peaks = Peaks()
    for _ in range(6):
        peaks.before(KEPT)
        outside = torch.zeros(1_000_000)  # what a recorder takes between two windows
        del outside
        peaks.after(KEPT)
        torch.zeros(50_000)
    peaks.end()
    assert peaks.bytes == [200_000, 200_000]
    assert peaks.parameters == 10_000
