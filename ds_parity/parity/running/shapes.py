"""Layouts and rollouts brought into a shape: streams, misleading first passes, windows with nothing to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

from ds_parity.config import Settings
from ds_parity.parity.running.layouts import Layout, closes_at, collate_layout
from ds_parity.planning.rollout import Rollout


def streamed(layout: Layout, ranks: int) -> Layout:
    """Return the layout as streams give it: each rank's micro-batches without gaps, idle only once they are used up."""
    streams = [[row[rank] for row in layout if row[rank]] for rank in range(ranks)]
    passes = max(len(stream) for stream in streams)
    return tuple(tuple(stream[i] if i < len(stream) else () for stream in streams) for i in range(passes))


def uneven(layout: Layout, target: int) -> Layout:
    """Return the layout with the gaps of every window moved behind its last micro-batches, rank by rank.

    A rank that leaves its idle passes out then runs fewer backwards than another. In the second window the last rank
    runs what rank 0 has, which runs nothing.
    """
    rows: list[tuple[tuple[Rollout, ...], ...]] = []
    for window in _windows(layout, target):
        rows += zip_longest(*([cell for cell in column if cell] for column in zip(*window, strict=True)), fillvalue=())
    # Without gaps a window may end sooner, so they are cut anew; what a pass contains stays the same from here on.
    first, *others = _windows(tuple(rows), target)
    emptied = tuple(((), *row[1:-1], row[0] + row[-1]) for row in others[0]) if others and len(layout[0]) > 1 else ()
    return (*first, *(emptied or chain(*others[:1])), *chain(*others[1:]))


def _windows(layout: Layout, target: int) -> Iterator[Layout]:
    """Yield the passes of each window that multiples of `target` rollouts cut, and what is left."""
    first = consumed = 0
    for index, row in enumerate(layout):
        count = sum(map(len, row))
        if (consumed + count) // target > consumed // target:
            yield layout[first : index + 1]
            first = index + 1
        consumed += count
    if first < len(layout):
        yield layout[first:]


def sloped(layout: Layout, target: int, *, rising: bool) -> Layout:
    """Return the layout with rollouts cut short, so that the first pass of a window leads to a wrong expected total.

    Those of each window's first pass that holds any are cut to 4 loss tokens and the others to 48, or the other way
    round: where tokens weigh, the correction is by a factor of up to 12.
    """
    first, other = (4, 48) if rising else (48, 4)
    rows, consumed, opened = [], 0, True
    for row in layout:
        tokens = first if opened else other
        rows.append(tuple(tuple(_cut(one, tokens) for one in cell) for cell in row))
        count = sum(map(len, row))
        opened = (opened and count == 0) or (consumed + count) // target > consumed // target
        consumed += count
    return tuple(rows)


def hollow(layout: Layout, target: int) -> Layout:
    """Return the layout with the completions of its second window's rollouts cut away: nothing there has a loss."""
    rows, consumed = [], 0
    for row in layout:
        in_second = consumed // target == 1
        rows.append(tuple(tuple(_cut(one, 0) for one in cell) for cell in row) if in_second else row)
        consumed += sum(map(len, row))
    return tuple(rows)


def _cut(rollout: Rollout, tokens: int) -> Rollout:
    return replace(rollout, tokens=rollout.tokens[: rollout.prompt_length + tokens])


def leveled(rollouts: Sequence[Rollout], tokens: int) -> tuple[Rollout, ...]:
    """Return the rollouts that have at least `tokens` loss tokens, cut to that many: all weigh the same by tokens."""
    return tuple(_cut(rollout, tokens) for rollout in rollouts if rollout.loss_tokens >= tokens)


def in_whole_windows(layout: Layout, settings: Settings) -> Layout:
    """Return a layout up to the last pass that closes a window.

    A prompt is complete with the last of its rollouts that is laid out, so that what is left may close windows earlier.

    Args:
        layout: of which the caller ends no windows.
        settings: the extra keys.
    """
    while layout:
        rows = collate_layout(layout)
        units = [sum(one.prompts if settings.count == "prompt" else one.rollouts for one in row) for row in rows]
        closing = _last_closing(units, settings)
        if closing == len(layout):
            break
        layout = layout[:closing]
    return layout


def _last_closing(units: Iterable[int], settings: Settings) -> int:
    """How many passes there are up to the last one that closes a window."""
    consumed, opened, closing = 0, 0, 0
    for number, count in enumerate(units, start=1):
        consumed += count
        if consumed >= closes_at(opened, settings):
            opened, closing = consumed, number
    return closing
