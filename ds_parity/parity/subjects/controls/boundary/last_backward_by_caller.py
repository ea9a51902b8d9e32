"""last-backward-by-caller: any number of backwards and one step(), on an engine of gradient accumulation 1.

ZeRO 1 and 2 train on the last backward alone.
"""

from __future__ import annotations

from ds_parity.parity.subjects.controls.boundary.last_backward_only import LastBackwardOnly


class LastBackwardByCaller(LastBackwardOnly):
    """The engine with this fault."""

    name = "last-backward-by-caller"
    seen = "OpenRLHF's ppo_actor.py with dynamic batches (#1131), DeepSpeed #8183"
    scenario = "caller"
    like = ("last-backward-only", "mid-window-checkpoint")
