"""indivisible-batch: rollouts that are no multiple of the batch are dropped at the end ('3509 and 640')."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.boundary.partial_window_leak import PartialWindowLeak


class IndivisibleBatch(PartialWindowLeak):
    """The engine with this fault: the tail is the window that the data leaves short."""

    name = "indivisible-batch"
    seen = "SkyRL #1483, open-instruct, TRL"
    like = ("partial-window-leak",)
