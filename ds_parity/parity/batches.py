"""Rollouts to micro-batches: padding, the prompts that are finished, and layouts over passes and ranks."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import torch

from ds_parity.errors import ConfigError
from ds_parity.parity.rollouts import BOS, PAD
from ds_parity.planning.records import MicroBatch, Rollout

Layout: TypeAlias = tuple[tuple[tuple[Rollout, ...], ...], ...]
"""layout[pass][rank] is the rollouts of one micro-batch; none on an idle rank."""

_MOST_PASSES = 9


def collate(rollouts: Sequence[Rollout], finished: int = 0) -> MicroBatch:
    """Pad rollouts on the right to one micro-batch, on the CPU.

    No rollouts give the micro-batch of an idle pass: one row of BOS and PAD without a loss token, all counts 0.

    Args:
        rollouts: B rollouts, each with at least one prompt token (what comes first has no prediction to score).
        finished: how many prompts these rollouts finish (>= 0).

    Returns:
        inputs `input_ids` (B, T) int64, `loss_mask` (B, T - 1) fp32, 1 where input_ids[:, 1:] is a completion's
        token, `advantages` (B,) fp32; T is the longest rollout, in tokens.

    Raises:
        ConfigError: a rollout has no prompt token.
    """
    for rollout in rollouts:
        if rollout.prompt_length < 1:
            raise ConfigError(f"rollout of prompt {rollout.prompt_id!r}: prompt_length is 0, must be >= 1; add a BOS")
    rows = rollouts or (Rollout(prompt_id="idle", tokens=(BOS, PAD), prompt_length=2),)
    length = max(len(row.tokens) for row in rows)
    padded = [[*row.tokens, *[PAD] * (length - len(row.tokens))] for row in rows]
    scored = [[row.prompt_length <= t < len(row.tokens) for t in range(1, length)] for row in rows]
    inputs = {
        "input_ids": torch.tensor(padded, dtype=torch.int64),
        "loss_mask": torch.tensor(scored, dtype=torch.float32),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    }
    tokens = sum(rollout.loss_tokens for rollout in rollouts)
    return MicroBatch(inputs=inputs, rollouts=len(rollouts), prompts=finished, tokens=tokens)


def to_device(micro_batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    """Return the micro-batch with every input on `device`; the counts stay on the host."""
    return replace(micro_batch, inputs={name: value.to(device) for name, value in micro_batch.inputs.items()})


def finishing(rollouts: Sequence[Rollout]) -> list[int]:
    """Return, for rollouts in the order of arrival, 1 where one is the last of its prompt and 0 elsewhere."""
    last = {rollout.prompt_id: index for index, rollout in enumerate(rollouts)}
    return [int(last[rollout.prompt_id] == index) for index, rollout in enumerate(rollouts)]


def collate_layout(layout: Layout) -> tuple[tuple[MicroBatch, ...], ...]:
    """Collate every micro-batch of a layout; a prompt is finished by its last rollout, passes first and then ranks."""
    flags = iter(finishing([rollout for row in layout for held in row for rollout in held]))
    return tuple(tuple(collate(held, sum(islice(flags, len(held)))) for held in row) for row in layout)


def uniform_layout(n_ranks: int, passes: int, rollouts: Sequence[Rollout]) -> Layout:
    """Lay the first `passes` x `n_ranks` rollouts out, one on every rank in every pass.

    Raises:
        ConfigError: there are fewer rollouts than that, or a number is below 1.
    """
    _check_positive(n_ranks=n_ranks, passes=passes)
    _check_enough(rollouts, passes * n_ranks, f"{passes} passes on {n_ranks} ranks")
    return tuple(tuple((rollouts[row * n_ranks + rank],) for rank in range(n_ranks)) for row in range(passes))


def ragged_layout(
    rollouts: Sequence[Rollout],
    n_ranks: int,
    target: int,
    windows: int,
    seed: int,
    *,
    max_rollouts: int = 5,
    same_windows: bool = True,
) -> Layout:
    """Lay rollouts out in the given order as unevenly as real streams do; the same for the same arguments.

    A window has 1 to 9 passes (more only where its rollouts would not fit), a micro-batch 0 to `max_rollouts`.
    The first window starts and ends with a rank idle, as later ones do now and then; with one rank it only starts so.
    A pass may be empty on every rank, but the last one of a window always holds a rollout.

    Args:
        rollouts: in the order of arrival; what is left over is not laid out.
        n_ranks: data-parallel ranks.
        target: rollouts that close a window.
        windows: how many windows to lay out.
        seed: of the raggedness.
        max_rollouts: the largest micro-batch, in rollouts.
        same_windows: True: each window holds the same `target` rollouts whatever `n_ranks`. False: the last pass of
            a window may go beyond the target, which shortens the next (`overshoot: carry`); where the rollouts run
            out, the last window is short and later ones are missing.

    Raises:
        ConfigError: with `same_windows`, fewer than `target` x `windows` rollouts; or a number is below 1.
    """
    _check_positive(n_ranks=n_ranks, target=target, windows=windows, max_rollouts=max_rollouts)
    if same_windows:
        _check_enough(rollouts, target * windows, f"{windows} windows of {target} rollouts")
    rng = random.Random(seed)
    counts: list[list[int]] = []
    held = 0
    for window in range(windows):
        size = min(target - held % target, len(rollouts) - held)
        if size == 0:
            break
        cut = _cut_window(size, n_ranks, max_rollouts, window, rng)
        if not same_windows:
            _overshoot(cut[-1], max_rollouts, len(rollouts) - held - size, rng)
        held += sum(map(sum, cut))
        counts += cut
    source = iter(rollouts)
    return tuple(tuple(tuple(islice(source, count)) for count in row) for row in counts)


def _cut_window(size: int, n_ranks: int, most: int, window: int, rng: random.Random) -> list[list[int]]:
    """Return [pass][rank] counts that sum to `size`, none above `most`, the last pass not empty."""
    idle_start = window % 2 == 0
    idle_end = window % 3 == 0 and n_ranks > 1  # a single rank can't both be idle and close the window
    fewest = math.ceil((math.ceil(size / most) + idle_start + idle_end) / n_ranks)
    usual = min(_MOST_PASSES, math.ceil(2 * size / n_ranks))  # more would leave most places empty
    passes = rng.randint(fewest, max(fewest, usual))
    idle = set()
    if idle_start:
        idle.add((0, rng.randrange(n_ranks)))
    if idle_end:
        idle.add((passes - 1, rng.randrange(n_ranks)))
    free = [(row, rank) for row in range(passes) for rank in range(n_ranks) if (row, rank) not in idle]
    counts = _spread(size, free, most, rng)
    return [[counts.get((row, rank), 0) for rank in range(n_ranks)] for row in range(passes)]


def _spread(size: int, free: list[tuple[int, int]], most: int, rng: random.Random) -> dict[tuple[int, int], int]:
    """Draw uneven counts for the free (pass, rank) places, then move single rollouts until they sum to `size`."""
    closing = rng.choice([place for place in free if place[0] == free[-1][0]])
    least = {place: int(place == closing) for place in free}
    counts = {place: rng.randint(least[place], most) for place in free}
    surplus = sum(counts.values()) - size
    while surplus:
        place, change = rng.choice(free), -1 if surplus > 0 else 1
        if least[place] <= counts[place] + change <= most:
            counts[place] += change
            surplus += change
    return counts


def _overshoot(closing: list[int], most: int, left: int, rng: random.Random) -> None:
    """Add to the ranks that are not idle in a window's last pass, in place, at most `left` rollouts in all."""
    for rank in (rank for rank, count in enumerate(closing) if count):
        extra = rng.randint(0, min(most - closing[rank], left))
        closing[rank] += extra
        left -= extra


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} = {value}: must be at least 1")


def _check_enough(rollouts: Sequence[Rollout], needed: int, what: str) -> None:
    if len(rollouts) < needed:
        raise ConfigError(f"{len(rollouts)} rollouts: {what} need {needed}; give more rollouts or ask for less")
