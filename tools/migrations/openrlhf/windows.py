"""How OpenRLHF deals rollouts to optimizer steps and micro-batches (read in 3c3be623), in our words.

Fixed batches (openrlhf/utils/loss_utils.py:80-105): every micro-batch has the same number of rollouts, and every epoch
is cut into windows of so many micro-batches, the last one shorter.

Dynamic batches (openrlhf/trainer/ppo_utils/replay_buffer.py:91-177): a window's rollouts are dealt to ranks, and each
rank's share to as many micro-batches as the rank needs that needs most: the number of micro-batches that first fit
comes to (openrlhf/utils/seqlen_balancing.py:234-247), then balanced by length. OpenRLHF balances by the differencing of
Karmarkar and Karp; here the longest rollout goes to the shortest micro-batch, which makes the same number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_parity.planning import Rollout

Row = list[list[Rollout]]
"""One pass: the rollouts of each rank."""


def epochs(rollouts: Sequence[Rollout], times: int, ranks: int, batch: int, max_tokens: int) -> Iterator[list[Row]]:
    """Yield the windows of so many epochs; `max_tokens` in a micro-batch, 0: one rollout in each."""
    for _ in range(times):
        if max_tokens:
            yield from dynamic(rollouts, ranks, batch, max_tokens)
        else:
            yield from fixed(rollouts, ranks, batch)


def fixed(rollouts: Sequence[Rollout], ranks: int, batch: int) -> Iterator[list[Row]]:
    """Yield windows of `batch` rollouts, one in each micro-batch; the last window of an epoch may be shorter."""
    shares = [rollouts[rank::ranks] for rank in range(ranks)]
    rows = [[[one] for one in row] for row in zip(*shares, strict=False)]
    for at in range(0, len(rows), batch // ranks):
        yield rows[at : at + batch // ranks]


def dynamic(rollouts: Sequence[Rollout], ranks: int, batch: int, max_tokens: int) -> Iterator[list[Row]]:
    """Yield windows of `batch` rollouts, in micro-batches of about `max_tokens`; what fills no window is left out."""
    for at in range(0, len(rollouts) // batch * batch, batch):
        shares = [rollouts[at + rank : at + batch : ranks] for rank in range(ranks)]
        passes = max(first_fit([len(one.tokens) for one in share], max_tokens) for share in shares)
        yield [list(row) for row in zip(*(balanced(share, passes) for share in shares), strict=True)]


def first_fit(lengths: Sequence[int], most: int) -> int:
    """Return how many micro-batches of at most `most` tokens first fit makes."""
    sums: list[int] = []
    for length in lengths:
        fits = [at for at, one in enumerate(sums) if one + length <= most]
        if fits:
            sums[fits[0]] += length
        else:
            sums.append(length)
    return len(sums)


def balanced(rollouts: Sequence[Rollout], parts: int) -> list[list[Rollout]]:
    """Return so many micro-batches of about the same number of tokens, none of them empty."""
    found: list[list[Rollout]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for one in sorted(rollouts, key=lambda one: -len(one.tokens)):
        at = min(range(parts), key=lambda part: (sums[part], part))
        found[at].append(one)
        sums[at] += len(one.tokens)
    return found
