"""Whether weights show how long gradients were: most optimizers forget it.

Adam and its like divide a gradient by the size of those before it, others keep its sign or its direction alone. A
factor that all steps have then leaves weights as they are. SGD shows it, unless clipping cuts every gradient to one
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ds_parity.parity.comparison.bounds import LINEAR
from ds_parity.trace import Header, StepRecord, Trace

# Nesterov's momentum has a gradient enter nearly twice, and a sketch errs by half at most (12.5 %: one sigma).
_AT_MOST = 3.0
_BEFORE = 3  # updates that momentum may carry on; what is older is less than a fifth of it
_ENOUGH = 8  # numbers of a sketch


def linear(reference: Header, candidate: Header) -> bool | None:
    """Whether both runs add gradients up as they are; None where a header does not name the optimizer."""
    names = [header.optimizer for header in (reference, candidate)]
    if None in names:
        return None
    return all(name is not None and name.lower() in LINEAR for name in names)


def forgetting(reference: Trace, candidate: Trace, pairs: Sequence[tuple[StepRecord, StepRecord]]) -> str:
    """Return what may hide from the weights that gradients have another length, in words; empty: nothing does."""
    shows = linear(reference.header, candidate.header)
    if shows is None:
        return "an optimizer that a trace does not name"
    if not shows:
        return str(reference.header.optimizer)
    return "" if _some_gradient_is_whole(reference, pairs) else "SGD with clipping in every step"


def _some_gradient_is_whole(reference: Trace, pairs: Sequence[tuple[StepRecord, StepRecord]]) -> bool:
    """Whether a step whose norms differ lies, by one of them, below any limit that clips."""
    known = [(a.grad_norm, b.grad_norm) for a, b in pairs if a.grad_norm and b.grad_norm]
    most = max((abs(y / x - 1) for x, y in known), default=0.0)
    shortest = min((min(x, y) for x, y in known if 2 * abs(y / x - 1) >= most > 0), default=None)
    return shortest is not None and shortest * _AT_MOST < _longest(reference, pairs)


def _longest(reference: Trace, pairs: Sequence[tuple[StepRecord, StepRecord]]) -> float:
    """How long a gradient of the reference entered at least: what neither momentum nor decay explains; 0: not known.

    A limit is not smaller than what has entered.
    """
    start = getattr(reference.header.start, "sketch", ()) if pairs and pairs[0][0].step == 1 else ()
    places = [start, *(() if a.weights is None else a.weights.sketch for a, _ in pairs)]
    if len(places[1]) < _ENOUGH or len({len(it) for it in places[1:]}) > 1:
        return 0.0
    from_start = len(start) == len(places[1])
    weights = [np.array(it) for it in places[0 if from_start else 1 :]]
    steps = [a for a, _ in pairs[0 if from_start else 1 :]]
    updates = [after - before for before, after in pairwise(weights)]
    lengths = [0.0]
    for at, (update, step) in enumerate(zip(updates, steps, strict=True)):
        rate = max(step.lr or (0.0,))
        # The momentum that is there before the first update that is known may be all of it.
        if rate > 0 and (at or from_start):
            basis = np.array([weights[at], *updates[max(0, at - _BEFORE) : at]]).T
            left = update - basis @ np.linalg.lstsq(basis, update, rcond=None)[0]
            lengths.append(float(np.linalg.norm(left)) / (rate * len(update) ** 0.5))
    return max(lengths)
