"""How other trainers deal rollouts of a window to ranks and passes, written anew from their sources.

Each function takes the lengths (n,) of a window, the ranks and the most tokens in a micro-batch, and returns passes of
one list of indices for each rank.
"""

import heapq
from pathlib import Path
from runpy import run_path

import numpy as np

from ds_parity.planning import Rollout

QUOTAS = run_path(str(Path(__file__).parents[1] / "tools" / "from_pipelinerl" / "quotas.py"))


def workload(lengths):
    """What verl weighs a length by, verl/utils/seqlen_balancing.py `calculate_workload`: a model 4,096 wide."""
    return 24_576 * lengths + lengths**2


def karmarkar_karp(values, parts, *, equal_size):
    """The largest differencing method: the two divisions that are least even are put together, heavy beside light."""
    order = sorted(range(len(values)), key=lambda index: (values[index], index))
    step = parts if equal_size else 1
    groups = [order[start : start + step] for start in range(0, len(order), step)]
    heap = []
    for number, group in enumerate(groups):
        sets = sorted(((values[index], [index]) for index in group), reverse=True) + [(0, [])] * (parts - len(group))
        heap.append((sets[-1][0] - sets[0][0], -sets[0][0], number, sets))
    heapq.heapify(heap)
    for number in range(len(groups), 2 * len(groups) - 1):
        one, other = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        sets = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        sets.sort(key=lambda held: -held[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], -sets[0][0], number, sets))
    return [members for _, members in heap[0][3]]


def verl(lengths, ranks, max_tokens):
    """verl-project/verl: ray_trainer.py `_balance_batch`, then seqlen_balancing.py `rearrange_micro_batches`.

    Rollouts are dealt to ranks by workload, as many to each; each rank divides its own by workload into as many
    micro-batches as the fullest rank needs for its tokens, so that one of them may have more than `max_tokens`.
    """
    work = workload(lengths).tolist()
    of_ranks = karmarkar_karp(work, ranks, equal_size=True)
    passes = max(-(-int(lengths[mine].sum()) // max_tokens) for mine in of_ranks)
    rows = []
    for mine in of_ranks:
        parts = karmarkar_karp([work[index] for index in mine], min(passes, len(mine)), equal_size=False)
        rows.append(sorted(([mine[at] for at in part] for part in parts), key=lambda part: -sum(work[i] for i in part)))
    return [[row[number] for row in rows] for number in range(len(rows[0]))]


def trl(lengths, ranks, max_tokens):
    """huggingface/trl, experimental/async_grpo/async_grpo_trainer.py, `TokenBudgetBatcher` (pull request 6092).

    Each rollout goes, as it comes, to the rank with the least sum of squared lengths that has room for its tokens.
    """
    passes, rows = [], [[] for _ in range(ranks)]
    squares, tokens = np.zeros(ranks), np.zeros(ranks)
    for index, length in enumerate(lengths.tolist()):
        fits = np.flatnonzero(tokens + length <= max_tokens)
        if not len(fits):
            passes.append(rows)
            rows, fits = [[] for _ in range(ranks)], np.arange(ranks)
            squares[:], tokens[:] = 0, 0
        rank = fits[squares[fits].argmin()]
        rows[rank].append(index)
        squares[rank] += length**2
        tokens[rank] += length
    return [*passes, rows]


def first_fit_decreasing(lengths, ranks, max_tokens):
    """Longest first, each into the first micro-batch with room; micro-batches in the order in which they were begun."""
    free, bins, used = np.full(len(lengths), max_tokens), [[] for _ in lengths], 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        into = int((free[: used + 1] >= lengths[index]).argmax())
        free[into] -= lengths[index]
        bins[into].append(index)
        used = max(used, into + 1)
    filled = [*bins[:used], *([] for _ in range(-used % ranks))]
    return [filled[start : start + ranks] for start in range(0, len(filled), ranks)]


def pipelinerl(lengths, ranks, max_tokens):
    """ServiceNow/PipelineRL, preprocess.py: a quota for each rank, filled in the order of arrival."""
    numbered = [Rollout(str(index), range(length), 1) for index, length in enumerate(lengths.tolist())]
    dealt = QUOTAS["deal"](numbered, ranks, QUOTAS["packed"](max_tokens))
    return [[[int(rollout.prompt_id) for rollout in row] for row in rows] for rows in dealt]


RIVALS = {
    "verl": verl,
    "TRL": trl,
    "first-fit decreasing": first_fit_decreasing,
    "PipelineRL's quota": pipelinerl,
}
