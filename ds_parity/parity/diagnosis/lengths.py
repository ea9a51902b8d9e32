"""Whether weights show how long gradients were: most optimizers forget it."""

from __future__ import annotations

from ds_parity.parity.comparison.bounds import LINEAR
from ds_parity.trace import Header


def linear(reference: Header, candidate: Header) -> bool | None:
    """Whether both runs add gradients up as they are; None where a header does not name the optimizer."""
    names = [header.optimizer for header in (reference, candidate)]
    if None in names:
        return None
    return all(name is not None and name.lower() in LINEAR for name in names)
