"""Which DeepSpeed is right for what: the one table that refuses, that the documentation prints and the tests walk.

It needs neither torch nor DeepSpeed. A release that no entry speaks of is right as far as anybody knows. Of each
release in MEASURED some rows of the matrix were run, of the newest all: tools/versions/results says which and what they
came to, and docs/versions.md shows both, with the counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ds_parity.config.faults import Fault
from ds_parity.config.features import (
    AUTOTP,
    COALESCED,
    FEATURES,
    FETCHED,
    L2_ON_CPU,
    LEFT_OUT,
    MOVED_OFFLOADED,
    PIPELINES,
    SCATTERED,
    SPARSE,
    SUMMED_EXPERTS_ON_CPU,
    Feature,
    named,
)
from ds_parity.config.releases import Release, release

OLDEST: Final = release("0.18.4")
"""The oldest release that is supported: the first that is right on plain ZeRO 2 (DeepSpeed #7718)."""
MEASURED: Final = tuple(map(release, ("0.18.4", "0.18.9", "0.19.0", "0.19.3", "0.19.5", "0.19.8")))
"""The releases whose code was read, and of which rows of the matrix were run, oldest first."""


class Verdict(StrEnum):
    """What a feature is on a release."""

    RIGHT = "right"
    CORRECTED = "corrected"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """What some releases of DeepSpeed get wrong, and what ds_parity makes of it.

    Attributes:
        features: names of those that it touches.
        verdict: `corrected` or `refused`.
        what: what DeepSpeed does, a sentence without its end.
        evidence: DeepSpeed's issue or the script that shows it, and what was measured.
        first: the first release that does it; None: it is in the oldest that is supported.
        right_from: the first release of DeepSpeed that is right; None: none is yet.
        way_out: what to do where it is refused, beside a newer release; "" where there is nothing else.
    """

    features: tuple[str, ...]
    verdict: Verdict
    what: str
    evidence: str
    first: Release | None = None
    right_from: Release | None = None
    way_out: str = ""

    def on(self, version: Release) -> bool:
        """Return whether a release does it."""
        after = self.first is None or not version < self.first
        return after and (self.right_from is None or version < self.right_from)


_BF16_OPTIMIZER: Final = "ZeRO 1 in bf16 with fp32 accumulation"
# All that DeepSpeed's own wrapper of ZeRO 1 and 2 runs.
_SHARDED_12: Final = tuple(
    feature.name
    for feature in FEATURES
    if feature.name.startswith(("ZeRO 1 ", "ZeRO 2 ")) and feature.name != _BF16_OPTIMIZER
)

UNGATHERED: Final = Entry(
    tuple(feature.name for feature in FEATURES if feature.name.startswith("ZeRO 3 ")),
    Verdict.CORRECTED,
    "on a CPU a step may run on weights that are still being gathered: only the last all-gather is waited for",
    "DeepSpeed #8539; rows of the matrix differ in a run and not in the next",
    right_from=release("0.19.8"),
)
"""What is random; from the first engine of ds_parity on, it is corrected for bare engines of the process, too."""

ENTRIES: Final = (
    Entry(
        ("ZeRO 0 in bf16",),
        Verdict.CORRECTED,
        "the step divides by fp16's loss scale, by which nothing has multiplied, and gradients are never cleared",
        "DeepSpeed #7839",
        right_from=release("0.18.6"),
    ),
    Entry(
        ("ZeRO 0 in bf16",),
        Verdict.CORRECTED,
        "a checkpoint has no state of the optimizer, and loads none: the next step undoes what was loaded",
        "tools/deepspeed_faults/checkpoint_bf16_zero0.py",
        right_from=release("0.18.5"),
    ),
    Entry(
        ("ZeRO 0 in fp16",),
        Verdict.CORRECTED,
        "the loss is not multiplied by the scale that the step divides by",
        "tools/deepspeed_faults/fp16_zero0_unscaled_loss.py",
    ),
    Entry(
        tuple(f"ZeRO {stage} in fp16" for stage in range(4)),
        Verdict.CORRECTED,
        "the step at which a dynamic loss scale grows is applied at half its size",
        "tools/deepspeed_faults/fp16_growing_scale.py",
    ),
    Entry(
        ("ZeRO 0 under torch_autocast in fp16",),
        Verdict.CORRECTED,
        "a step that the GradScaler skips is counted as taken",
        "tools/deepspeed_faults/autocast_fp16_zero0_skip.py",
    ),
    Entry(
        tuple(f"ZeRO {stage} under torch_autocast in fp16" for stage in (1, 2, 3)),
        Verdict.CORRECTED,
        "gradients are clipped, and their norm is taken, before the GradScaler unscales them; where the scale grows "
        "later parameter groups are applied at half their size, and after an overflow it never falls",
        "autocast_fp16_clipping.py, autocast_fp16_groups.py and autocast_fp16_overflow.py in tools/deepspeed_faults",
    ),
    Entry(
        (_BF16_OPTIMIZER,),
        Verdict.CORRECTED,
        "it gets the optimizer of ZeRO 0, which sums in bf16, divides by fp16's loss scale and partitions nothing",
        "read in DeepSpeed 0.18.4 and 0.18.9: runtime/constants.py gave BFLOAT16 and DDP_BFLOAT16 one value",
        right_from=release("0.18.6"),
    ),
    Entry(
        (_BF16_OPTIMIZER,),
        Verdict.CORRECTED,
        "the last micro-batch of a window is not reduced between ranks",
        "DeepSpeed #7985",
        right_from=release("0.19.0"),
    ),
    Entry(
        ("ZeRO 2 with CPU offload",),
        Verdict.CORRECTED,
        "gradients between the first and the last pass of a window are lost",
        "DeepSpeed #7967",
        right_from=release("0.19.0"),
    ),
    Entry(
        _SHARDED_12,
        Verdict.CORRECTED,
        'the first step raises "Output 0 of SplitBackward0 is a view and is being modified inplace", with every torch '
        "since 1.8, where weights are flattened on the accelerator (on a CPU always)",
        "DeepSpeed #7948",
        first=release("0.18.6"),
        right_from=release("0.19.0"),
    ),
    UNGATHERED,
    Entry(
        (LEFT_OUT.name,),
        Verdict.CORRECTED,
        "gradients of parameters that a pass leaves out are those of an old window, or never reach an offloaded "
        "optimizer; before 0.19.5 nothing is noted of them, and ds_parity keeps the account itself",
        "tools/deepspeed_faults/stale_gradient.py and used_in_some_passes.py",
    ),
    Entry(
        (SCATTERED.name,),
        Verdict.REFUSED,
        "gradients are not summed over ranks",
        "measured on 0.18.4 and 0.18.9: torch and the probe differ by 70%, and bare DeepSpeed is as wrong; 0.19.0 to "
        "0.19.7 were not measured",
        right_from=release("0.19.8"),
        way_out="leave contiguous_gradients out, which is true then",
    ),
    Entry(
        (SPARSE.name,),
        Verdict.REFUSED,
        "rows of a gradient that add up to 0 are lost",
        "tools/deepspeed_faults/sparse_gradients_zero0.py; 0.19.6 and 0.19.7 were not measured, and 0.19.8 refuses the "
        "key itself",
        right_from=release("0.19.8"),
        way_out="leave sparse_gradients out: gradients are then reduced as they are",
    ),
    Entry(
        (FETCHED.name,),
        Verdict.REFUSED,
        "what lies in a parameter's padding is added to the next one where ranks do not divide its size",
        "tools/deepspeed_faults/fetched_by_all_reduce.py; 0.19.4 was not measured",
        right_from=release("0.19.5"),
        way_out="leave stage3_use_all_reduce_for_fetch_params out: weights are gathered as they are then",
    ),
    Entry(
        (AUTOTP.name,),
        Verdict.REFUSED,
        "its gradients and norms were not measured there",
        "measured on 0.19.8 alone, where they are right but for a norm on ZeRO 0",
        right_from=release("0.19.8"),
        way_out="leave tensor_parallel out",
    ),
    Entry(
        (COALESCED.name,),
        Verdict.REFUSED,
        "there is no such method",
        "read in DeepSpeed",
        right_from=release("0.19.2"),
        way_out="leave the block out: the step is the same, and passes of ZeRO 2 and 3 reduce in each backward",
    ),
    Entry(
        (MOVED_OFFLOADED.name,),
        Verdict.REFUSED,
        "it ends in an assertion, though weights and gradients could be moved",
        "read in DeepSpeed, runtime/engine.py; a row of the matrix raised on 0.18.4",
        right_from=release("0.19.0"),
        way_out="leave the call out: the optimizer's states are not on the accelerator",
    ),
    Entry(
        (L2_ON_CPU.name,),
        Verdict.REFUSED,
        "its weight decay is decoupled, as AdamW's is, whatever adam_w_mode says",
        "DeepSpeed #8307, read in 0.19.5 and 0.19.6; rows of the matrix on 0.18.4 differ from torch's Adam",
        right_from=release("0.19.6"),
        way_out="set torch_adam to true in the optimizer's params, or its weight_decay to 0",
    ),
    Entry(
        (PIPELINES.name,),
        Verdict.REFUSED,
        "steps were wrong by 9e-4, or NaN, where one column has a weight of 0, and 0.18.4 raises in each step",
        "tests/distributed/test_pipelines.py on 0.18.4, 0.18.9, 0.19.0 and 0.19.5; 0.19.3, 0.19.6 and 0.19.7 were not "
        "measured",
        right_from=release("0.19.8"),
    ),
    Entry(
        (SUMMED_EXPERTS_ON_CPU.name,),
        Verdict.REFUSED,
        'the norm of experts\' gradients raises "new(): data must be a sequence (got float)"',
        "a row of the matrix raised on 0.18.4; read in DeepSpeed, runtime/utils.py",
        right_from=release("0.19.2"),
        way_out="use ZeRO 2, or leave data_types.grad_accum_dtype out",
    ),
)


def measured(version: Release) -> bool:
    """Return whether a release is one of those that were read and run.

    By its letters: a build of one's own (0.19.8+cu12) and a post release stand in the order where their release does,
    but what they contain may be something else.
    """
    return str(version) in map(str, MEASURED)


def entries_of(feature: Feature, version: Release) -> list[Entry]:
    """Return what a release gets wrong of a feature."""
    return [entry for entry in ENTRIES if feature.name in entry.features and entry.on(version)]


def verdict(feature: Feature, version: Release) -> Verdict:
    """Return what the table says of a feature on a release: the worst of its entries, `right` where there is none."""
    found = {entry.verdict for entry in entries_of(feature, version)}
    return next((one for one in (Verdict.REFUSED, Verdict.CORRECTED) if one in found), Verdict.RIGHT)


def asked_for(config: Mapping[str, Any], version: Release, wanted: Verdict) -> list[tuple[Feature, Entry]]:
    """Return the entries of a verdict that a configuration meets on a release, with the feature that it asks for."""
    return [
        (feature, entry)
        for feature in FEATURES
        if feature.asked_for(config)
        for entry in entries_of(feature, version)
        if entry.verdict is wanted
    ]


def refused(config: Mapping[str, Any], version: Release) -> Iterator[Fault]:
    """Yield a fault for everything that a configuration asks for and a release can't do.

    Args:
        config: an extended or a plain DeepSpeed configuration.
        version: the release of DeepSpeed that is to run it.
    """
    for feature, entry in asked_for(config, version, Verdict.REFUSED):
        yield Fault(*feature.shown_in(config), *rule_and_way_out(feature, entry, version))


def rule_and_way_out(feature: Feature, entry: Entry, version: Release) -> tuple[str, str]:
    """Return why a feature is refused on a release, and what to do."""
    rule = f"DeepSpeed {version} is wrong on {feature.name}: {entry.what} ({entry.evidence})"
    newer = f"use DeepSpeed {entry.right_from} or newer" if entry.right_from else "no release is right yet"
    return rule, f"{newer}; or {entry.way_out}" if entry.way_out else newer


def refused_by_call(name: str, version: Release | None, accelerator: str) -> str | None:
    """Return why a release can't do what a call asks for, None where it can.

    Args:
        name: of the feature.
        version: the release that is installed; None where its version names none.
        accelerator: DeepSpeed's name of the one that it runs on.
    """
    feature = named(name)
    if feature.accelerator not in ("", accelerator):
        return None
    if version is None or verdict(feature, version) is not Verdict.REFUSED:
        return None
    entry = next(one for one in entries_of(feature, version) if one.verdict is Verdict.REFUSED)
    return "{}; {}".format(*rule_and_way_out(feature, entry, version))
