"""Layouts of rollouts over passes and ranks: even ones, ragged ones as real streams are, planned ones."""

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal, TypeAlias

from ds_parity.collation import collate
from ds_parity.config import Settings
from ds_parity.errors import ConfigError
from ds_parity.planning.plans import Plan, rollout_key
from ds_parity.planning.rollout import MicroBatch, Rollout

Layout: TypeAlias = tuple[tuple[tuple[Rollout, ...], ...], ...]
"""layout[pass][rank] is the rollouts of one micro-batch; none on an idle rank."""

Passes: TypeAlias = Sequence[Sequence[MicroBatch]]
"""passes[pass][rank] is a collated micro-batch; one without rollouts on an idle rank."""

_MOST_PASSES = 9

# What a window of a scenario consists of where the caller ends windows and the configuration gives no target.
NOMINAL_PASSES = 8


def closes_at(opened: int, settings: Settings) -> int:
    """Return at how many units of all, or more, a window ends.

    Args:
        opened: units of all windows before it (>= 0).
        settings: with a target (`cut_by`).
    """
    if settings.overshoot == "carry":
        return (opened // settings.target + 1) * settings.target
    return opened + settings.target


def cut_by(settings: Settings) -> Settings:
    """Return the settings whose target says where a scenario's windows end.

    They are those of the configuration, completed where `ds_parity.boundary` is `caller` and it gives no target.
    """
    if settings.gradient_accumulation_passes is not None:
        return settings
    return settings.model_copy(update={"gradient_accumulation_passes": NOMINAL_PASSES})


def of_one_unit(settings: Settings) -> bool:
    """Whether one factor corrects all terms of the loss, so that totals need not be known beforehand."""
    units = {term.weight for term in (settings.terms or {}).values()}
    return len(units) < 2 and not units & {"target", "weight"}


def own_weight(tokens: int) -> float:
    """Return what a micro-batch weighs by itself (`loss_weight: weight`), from how many loss tokens it has.

    A multiple of 1/4 from 0 to 1.75, which sums represent exactly in any order; some weigh 0.
    """
    return tokens % 8 / 4


def weighed(passes: Passes, settings: Settings) -> tuple[tuple[MicroBatch, ...], ...]:
    """Return the micro-batches with weights of their own, where the loss or one of its terms is weighed by such."""
    own = [name for name, term in (settings.terms or {}).items() if term.weight == "weight"]
    if not own and settings.loss_weight != "weight":
        return tuple(tuple(row) for row in passes)

    def weight(batch: MicroBatch) -> float | dict[str, float]:
        return dict.fromkeys(own, own_weight(batch.tokens)) if own else own_weight(batch.tokens)

    return tuple(tuple(replace(batch, weight=weight(batch)) for batch in row) for row in passes)


def finishing(keys: Sequence[Hashable]) -> list[int]:
    """Return 1 where a sequence is the last of its key, and 0 elsewhere.

    Args:
        keys: of prompts or rollouts, one for each sequence, in the order in which they are run.
    """
    last = {key: index for index, key in enumerate(keys)}
    return [int(last[key] == index) for index, key in enumerate(keys)]


def collate_layout(
    layout: Layout, collation: Literal["padded", "packed"] = "padded"
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Collate every micro-batch of a layout.

    A prompt, or a rollout of several turns, is finished by its last sequence: passes first, then ranks.
    """
    run = [rollout for row in layout for cell in row for rollout in cell]
    prompts = iter(finishing([rollout.prompt_id for rollout in run]))
    rollouts = iter(finishing([rollout_key(rollout, index) for index, rollout in enumerate(run)]))

    def collated(cell: Sequence[Rollout]) -> MicroBatch:
        finished = [sum(islice(flags, len(cell))) for flags in (rollouts, prompts)]
        return collate(cell, layout=collation, rollouts=finished[0], prompts=finished[1])

    return tuple(tuple(collated(cell) for cell in row) for row in layout)


def planned_layout(plan: Plan) -> Layout:
    """Return the layout of a plan, idle passes included."""
    return tuple(
        tuple(tuple(plan.rollouts[at] for at in window.micro_batch(index, rank)) for rank in range(plan.dp_world_size))
        for window in plan.windows
        for index in range(window.passes)
    )


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
    consumed = 0
    for window in range(windows):
        size = min(target - consumed % target, len(rollouts) - consumed)
        if size == 0:
            break
        cut = _cut_window(size, n_ranks, max_rollouts, window, rng)
        if not same_windows:
            _overshoot(cut[-1], max_rollouts, len(rollouts) - consumed - size, rng)
        consumed += sum(map(sum, cut))
        counts += cut
    source = iter(rollouts)
    return tuple(tuple(tuple(islice(source, count)) for count in row) for row in counts)


def full_layout(
    rollouts: Sequence[Rollout],
    n_ranks: int,
    target: int,
    windows: int,
    seed: int,
    *,
    max_rollouts: int = 5,
    exact: bool = False,
) -> Layout:
    """Lay rollouts out so that every rank has some in every pass; the same for the same arguments.

    A window has up to 9 passes (more only where its rollouts would not fit) of unequal micro-batches, and its last pass
    reaches the target exactly. Where the target is below the number of ranks, a window is one pass that goes beyond it.
    Ranks are idle only with `exact` there, and where too few rollouts are left.

    Args:
        rollouts: in the order of arrival; what is left over is not laid out.
        n_ranks: data-parallel ranks.
        target: rollouts that close a window.
        windows: how many windows to lay out at most.
        seed: of the numbers of rollouts.
        max_rollouts: the largest micro-batch, in rollouts.
        exact: no window goes beyond the target.

    Raises:
        ConfigError: a number is below 1.
    """
    _check_positive(n_ranks=n_ranks, target=target, windows=windows, max_rollouts=max_rollouts)
    rng = random.Random(seed)
    source, left = iter(rollouts), len(rollouts)
    rows: list[tuple[tuple[Rollout, ...], ...]] = []
    for _ in range(windows):
        size = min(target if exact else max(target, n_ranks), left)
        if size == 0:
            break
        most = max(1, min(_MOST_PASSES, size // n_ranks))
        passes = rng.randint(min(most, 2), most)
        passes = max(passes, math.ceil(size / max_rollouts / n_ranks))
        cells = [(row, rank) for row in range(passes) for rank in range(n_ranks)]
        counts = _spread(size, cells, max_rollouts, rng, full=size >= len(cells))
        rows += [tuple(tuple(islice(source, counts[row, rank])) for rank in range(n_ranks)) for row in range(passes)]
        left -= size
    return tuple(rows)


def _cut_window(size: int, n_ranks: int, most: int, window: int, rng: random.Random) -> list[list[int]]:
    """Return counts[pass][rank] that sum to `size`, none above `most`, the last pass not empty."""
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


def _spread(
    size: int, free: list[tuple[int, int]], most: int, rng: random.Random, *, full: bool = False
) -> dict[tuple[int, int], int]:
    """Draw uneven counts for the free (pass, rank) places, then move single rollouts until they sum to `size`.

    A place of the last pass gets at least one; with `full`, every place does.
    """
    closing = rng.choice([place for place in free if place[0] == free[-1][0]])
    least = {place: int(full or place == closing) for place in free}
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
