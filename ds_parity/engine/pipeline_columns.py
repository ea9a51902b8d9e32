"""What the ranks of a pipeline tell each other before a window runs, and what they then refuse, all of them alike.

A rank that raised inside DeepSpeed's `train_batch()` would leave the others waiting there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ds_parity.engine.internals.group_options import CLIPPING
from ds_parity.engine.ranks.wire import differing_rates
from ds_parity.errors import RankDesyncError, WindowError
from ds_parity.window import Counts


@dataclass(frozen=True)
class PipelineColumn:
    """What one rank says of its column of the pipeline.

    Attributes:
        number: of the column, the data-parallel rank.
        counts: of each micro-batch.
        runs: whether there is anything that it could run.
        stage: of the rank.
        rates: what its coming step uses, as `Options.told` gives it.
        plans: numbers of the plans that it has begun in this window (`MicroBatch.plan_number`).
        ties: whether it trains each weight that its stage shares with others, by its name.
        norms: how many norms its step adds up over the stages (`norms_over_stages`).
        frozen: a checksum of what its optimizer steps and is frozen now (`Adapter.frozen_parameters`).
        experts_apart: whether experts of its stage lie on different columns.
    """

    number: int
    counts: tuple[Counts, ...]
    runs: bool
    stage: int = field(default=0, compare=False)
    rates: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    plans: tuple[int, ...] = field(default=(), compare=False)
    ties: Mapping[str, bool] = field(default_factory=dict, compare=False)
    norms: int = field(default=0, compare=False)
    frozen: int = field(default=0, compare=False)
    experts_apart: bool = field(default=False, compare=False)

    @property
    def clips(self) -> list[tuple[str, str]]:
        """What clips if it was changed: one gradient is clipped on all stages."""
        return [(name, value) for name, value in self.rates if name == CLIPPING]


def refuse_parted(gathered: Sequence[PipelineColumn]) -> None:
    """Raise RankDesyncError where stages of a column differ, learning rates, groups, or what is trained of a tie."""
    for rank, one in enumerate(gathered):
        first = next(other for other in gathered if other.number == one.number)
        if first != one:
            raise RankDesyncError(
                f"rank {rank} gave {len(one.counts)} micro-batches of {one.counts}, and another stage of its "
                f"column (data-parallel rank {one.number}) gave {first.counts}: all ranks of a column give the "
                "same micro-batches; give each rank those of its data-parallel rank (engine.grid)"
            )
        at, first = next((at, other) for at, other in enumerate(gathered) if other.stage == one.stage)
        if first.rates != one.rates:
            raise RankDesyncError(
                f"ranks of stage {one.stage} differ in "
                f"{differing_rates({at: first.rates, rank: one.rates})}: their weights would part. "
                "The weights are as they were. Set learning rates, and whatever else is named here, on all ranks alike"
            )
        if one.clips != gathered[0].clips:
            raise RankDesyncError(
                f"ranks differ in {differing_rates({0: gathered[0].clips, rank: one.clips})}: each would clip by a "
                "bound of its own. The weights are as they were. Set it on all ranks of the pipeline alike"
            )
        if first.frozen != one.frozen:
            raise RankDesyncError(
                f"rank {rank}, of stage {one.stage} of the pipeline, has frozen other parameters than another column "
                "of its stage: gradients of different ones would be added up. The weights are as they were. Freeze the "
                "same ones on all columns"
            )
        if one.norms != gathered[0].norms:
            raise RankDesyncError(
                f"rank {rank}, of stage {one.stage} of the pipeline, has parameters in {one.norms} parameter groups, "
                f"and stage {gathered[0].stage} in {gathered[0].norms}: on ZeRO 1 stages add up a norm for each group, "
                "and would wait for each other for ever. The weights are as they were. Give each stage a parameter in "
                "each group, or all of them one group, or take ZeRO 0"
            )
        for name, trained in one.ties.items():
            first = next(other for other in gathered if name in other.ties)
            if first.ties[name] != trained:
                states = "frozen, or not handed over", "trained"
                raise RankDesyncError(
                    f"rank {rank}, of stage {one.stage} of the pipeline, has {name} {states[trained]}, and stage "
                    f"{first.stage} has it {states[first.ties[name]]}: they add up its gradients, and one would wait "
                    "for the other for ever, or the weights part. They are as they were. Train what stages share on "
                    "all of them, or on none"
                )


def refuse_uneven(gathered: Sequence[PipelineColumn], silences: Callable[[Counts], bool]) -> None:
    """Raise on every rank where columns would run other numbers of micro-batches, in which experts wait for all.

    Args:
        gathered: what each rank said, by rank.
        silences: whether a micro-batch weighs nothing, and is not run.

    Raises:
        WindowError: they would.
    """
    runs = {one.number: sum(not silences(counts) for counts in one.counts) for one in gathered}
    if len(set(runs.values())) > 1:
        told = ", ".join(f"{many} of data-parallel rank {number}" for number, many in sorted(runs.items()))
        raise WindowError(
            f"train_window() was given other numbers of micro-batches that weigh something on columns ({told}), "
            "and experts lie on different ranks (DeepSpeed's MoE with ep_size above 1): each of them waits for the "
            "tokens of all; give every column as many, or use ep_size 1"
        )
