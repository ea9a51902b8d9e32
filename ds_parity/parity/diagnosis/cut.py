"""How both sides cut one stream of rollouts into windows, and which targets end windows there."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

from ds_parity.trace import Trace


@dataclass(frozen=True)
class Cut:
    """How both sides cut the same stream of rollouts into windows.

    Attributes:
        a: rollouts of each of the reference's steps.
        b: of each of the candidate's.
        passes: of each of the candidate's steps, 0 where it doesn't say.
        of_reference: passes of each of the reference's steps, likewise.
        fewest: rollouts that each step surely had before its last pass, of the reference, of the candidate
            (`before_last_passes`); empty: nothing is known of them.
    """

    a: list[int]
    b: list[int]
    passes: list[int]
    of_reference: list[int]
    fewest: tuple[list[int], list[int]] = ([], [])

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """Rollouts consumed at the end of each step of the reference, of the candidate."""
        return list(accumulate(self.a)), list(accumulate(self.b))

    @cached_property
    def same(self) -> int:
        """How many steps contain as many rollouts on both sides, from the first on."""
        pairs = zip(self.a, self.b, strict=False)
        return next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(self.a), len(self.b)))

    @cached_property
    def all_used(self) -> bool:
        """Whether both sides train on as many rollouts."""
        return sum(self.a) == sum(self.b)

    @property
    def apart(self) -> bool:
        """Whether windows end elsewhere: not only the run, of which the last window may then be short."""
        return self.same < min(len(self.a), len(self.b)) - (not self.all_used)

    @cached_property
    def counted(self) -> bool:
        """Whether the passes of all whole windows are known."""
        return all(self.passes[:-1]) and all(self.of_reference[:-1])

    @cached_property
    def _passes_end(self) -> list[int]:
        """Rollouts consumed at the end of those passes that end a window on either side."""
        return sorted({0, *self.ends[0], *self.ends[1]})

    @cached_property
    def _longest(self) -> tuple[float, float]:
        """Rollouts that a pass may have, by side: twice an average one, of the window where that is greatest.

        Windows of different numbers of passes come to one average where all passes have as many rollouts.
        """
        sides = ((self.a, self.of_reference), (self.b, self.passes))
        whole = [pair for windows, passes in sides for pair in zip(windows[:-1], passes[:-1], strict=True)]
        (held, n), *others = whole or [(0, 0)]
        if others and len({passes for _, passes in whole}) > 1 and all(held * m == it * n for it, m in others):
            return held / n, held / n
        return tuple(  # type: ignore[return-value]
            2 * max(held / n for held, n in zip(windows, passes, strict=True)) if all(passes) else math.inf
            for windows, passes in sides
        )

    @property
    def longest(self) -> int:
        """Rollouts that a pass of either side may have, in whole ones; passes of all windows are known."""
        return math.floor(max(self._longest))

    @cached_property
    def before(self) -> tuple[list[int], list[int]]:
        """Rollouts that had surely been consumed before the last pass of each window, by side."""
        of_a, of_b = (
            [max(self._before(side, end), begin + one) for begin, end, one in zip([0, *ends], ends, some, strict=False)]
            for side, ends in enumerate(self.ends)
            for some in (self.fewest[side] or [0] * len(ends),)
        )
        return of_a, of_b

    def _before(self, side: int, end: int) -> int:
        seen = self._passes_end[bisect_left(self._passes_end, end) - 1]
        return seen if math.isinf(self._longest[side]) else max(seen, math.floor(end - self._longest[side]))

    def targets(self, side: int, *, carried: bool, after: int = 0, among: range | None = None) -> range:
        """Return the targets with which windows end where they do: in the pass that reaches it, and in none before.

        Args:
            side: 0: the reference; 1: the candidate.
            carried: what a window has beyond its target counts for the next one; otherwise each counts from 0.
            after: so many windows are left out, and what they had is counted for none.
            among: no others are asked for: once they are all excluded, no further window is seen.
        """
        ends = self.ends[side]
        start = ends[after - 1] if after else 0
        least, most = (among.start, among.stop - 1) if among is not None else (1, max(ends))
        # What is behind the first windows that are not alike excludes the most.
        apart = max(after, min(self.same, len(ends)))
        for at in chain(range(apart, len(ends)), range(after, apart)):
            begin = ends[at - 1] if at else 0
            base, number = (start, at - after + 1) if carried else (begin, 1)
            before = self.before[side][at]
            # A window has one pass at least, which may reach any target.
            if before > begin:
                least = max(least, (before - base) // number + 1)
            if at < len(ends) - 1:  # the last one may be short
                most = min(most, (ends[at] - base) // number)
            if least > most:
                break
        return range(least, most + 1)


def before_last_passes(trace: Trace) -> list[int]:
    """Return how many rollouts each step surely had before its last pass: one in each micro-batch.

    The last pass has a micro-batch of each rank at most. Where a step has more micro-batches than rollouts, some held
    none, and the record proves nothing.
    """
    ranks = trace.header.ranks or 1
    counts = [
        0 if one.passes is None or one.idle_passes is None else one.passes * ranks - one.idle_passes
        for one in trace.steps
    ]
    if any(count > (one.rollouts or 0) for count, one in zip(counts, trace.steps, strict=True)):
        return [0] * len(counts)
    return [max(0, count - ranks) for count in counts]


def common(one: range, other: range) -> range:
    """Return the numbers that are in two ranges without gaps."""
    return range(max(one.start, other.start), min(one.stop, other.stop))
