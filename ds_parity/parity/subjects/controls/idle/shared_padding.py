"""shared-padding: one dummy object is handed to several passes and changed in place."""

from __future__ import annotations

from ds_parity.parity.subjects.controls.loop import Loop


class SharedPadding(Loop):
    """The engine with this fault."""

    name = "shared-padding"
    seen = "prime-rl #1419"
    like = ("global-metadata", "data-or-seed")

    def backward(self, index: int) -> None:
        """Make a dummy of the next real micro-batch by clearing its mask, and leave it so."""
        if self.own[index].idle:
            later = [batch for batch in self.own[index + 1 :] if not batch.idle]
            for batch in later[:1]:
                batch.inputs["loss_mask"].zero_()
        super().backward(index)
