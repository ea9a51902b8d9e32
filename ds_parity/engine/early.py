"""The counts of the next window's passes, which travel with the sum of a step where they are known by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_parity.engine.ranks.exchange import Exchange
from ds_parity.engine.ranks.upcoming import Upcoming
from ds_parity.engine.ranks.wire import Place
from ds_parity.engine.record.metrics import Meter


@contextmanager
def announced_early(
    exchange: Exchange, queue: Upcoming | None, meter: Meter, place: Callable[[], Place]
) -> Iterator[None]:
    """Announce the passes behind a window with the sum of its step, where threads have made them on all ranks.

    All ranks have announced as many passes, and know alike whether every rank may be early.

    Args:
        exchange: of counts.
        queue: of the stream's passes; None where a loop reads no stream of the engine's.
        meter: that sums up inside.
        place: returns where this rank is.
    """
    wanted = queue is not None and not queue.all_out_of_data and len(queue) < exchange.slots
    if queue is None or not wanted or not exchange.may_be_early or exchange.stopping:
        yield
        return
    passes = None if queue.early is None else queue.early.known()
    announced = None if passes is None else [one.announcement for one in passes]
    early = exchange.start_early(place(), announced)
    meter.company = early.rider
    try:
        yield
    finally:
        # Also behind a step that raised: the other ranks have heard of these passes.
        meter.company = None
        arrived = early.arrived()
        if arrived is not None and passes is not None and queue.early is not None:
            queue.early.take()
            queue.announced(passes, arrived)
