"""How PipelineRL's preprocessor deals rollouts to trainers (pipelinerl/preprocess.py, read in 58d3934), in our words.

Every rank has the same quota of a window's rollouts. Micro-batches are filled in the order of arrival, for one rank
after the other, until the next rollout would not fit; a rank that has its quota is given nothing while the others go
on.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ds_parity.planning import Rollout

Row = list[list[Rollout]]
Fits = Callable[[Sequence[Rollout], Rollout], bool]


def packed(max_tokens: int) -> Fits:
    """Take rollouts up to `max_tokens` tokens together; one that is longer comes alone."""
    return lambda batch, rollout: sum(len(one.tokens) for one in (*batch, rollout)) <= max_tokens


def padded(count: int) -> Fits:
    """Take `count` rollouts."""
    return lambda batch, _: len(batch) < count


def deal(rollouts: Sequence[Rollout], ranks: int, fits: Fits) -> Iterator[Row]:
    """Yield the rollouts of each rank, pass by pass, of one window.

    Args:
        rollouts: of the window; their number is a multiple of `ranks`.
        ranks: data-parallel ranks.
        fits: whether a micro-batch takes one more.
    """
    waiting, left = deque(rollouts), [len(rollouts) // ranks] * ranks
    while waiting:
        row: Row = [[] for _ in range(ranks)]
        for rank, batch in enumerate(row):
            while left[rank] and waiting and (not batch or fits(batch, waiting[0])):
                batch.append(waiting.popleft())
                left[rank] -= 1
        yield row
