"""What a diagnosis of a fault is worth: right, honestly unknown, or misleading; and the table of all.

    python -m tests.hard.blind_faults.judged --half 1 --stage 1 --dtype fp32 --out /tmp/half1

runs a half on two ranks, judges it against the torch reference and against the clean loop, and prints each cause beside
the truth, which a reader may judge more strictly than the rules here do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.parity.diagnosis import CLASSES, Diagnosis, diagnose, grouped
from ds_parity.trace import read_trace
from tests.hard.blind_faults import ALL, half
from tests.hard.blind_faults.recorded import REFERENCES, record, shape

# Which causes say what is wrong with a fault. Of half 0, with which the rules were developed; that of any other fault
# is right by its class, and a reader judges it by its truth.
RIGHT: dict[str, set[str]] = {
    "third-window-in-two-steps": {"step-in-mid-window"},
    "boundary-one-pass-late": {"boundary-a-pass-late"},
    "rollout-dropped-in-every-window": {"silent-truncation"},
    "one-rank-one-pass-behind": {"data-or-seed"},
    "total-of-the-step-before": {"wrong-window"},
    "total-smoothed": {"another-divisor"},
    "prompt-tokens-in-the-total": {"another-divisor"},
    "divided-by-the-passes-too": {"gas-scaled-twice"},
    "short-window-divided-as-a-full-one": {"another-divisor", "target-not-actual"},
    "third-step-not-unscaled": {"another-divisor"},
    "rollouts-weigh-not-tokens": {"mean-of-micro-batches", "weighed-by-another-unit"},
    "mean-of-row-means": {"mixed-weights"},
    "first-pass-lost": {"first-passes-lost"},
    "gradient-of-one-rank-lost": {"rank-left-out"},
    "clip-at-another-limit": {"clip-at-wrong-scale", "implicit-clip"},
    "clipping-off": {"clip-at-wrong-scale", "implicit-clip", "clipping-left-out"},
    "clip-by-the-norm-of-the-step-before": {"clip-at-wrong-scale"},
    "gradient-normalised-always": {"clip-at-wrong-scale", "implicit-clip"},
    "adam-without-bias-correction": {"adam-without-bias-correction"},
    "resumed-with-adams-step-at-zero": {"adam-step-count"},
    "weight-decay-missing": {"weight-decay"},
    "weight-decay-coupled": {"weight-decay"},
    "sgd-with-weight-decay": {"weight-decay"},
    "head-learns-faster": {"group-lr"},
    "optimizer-state-reset-every-second-step": {"resume-loses-optimizer"},
    "resumed-without-optimizer-state": {"resume-loses-optimizer"},
    "weights-decayed-by-hand": {"weights-scaled-by-hand"},
    "weights-rounded-to-bf16": {"weights-in-bf16"},
    "initial-weights-from-bf16": {"initial-weights"},
    "resumed-with-older-weights": {"weights-of-the-step-before"},
    "warm-up-counted-from-one": {"schedule-off-by-steps"},
    "scheduler-stepped-twice": {"scheduler-stepped-often"},
    "learning-rate-times-ranks": {"base-lr"},
    "learning-rate-used-one-step-late": {"lr-in-use"},
    "decay-to-another-floor": {"another-lowest-lr"},
    "decay-too-slow": {"schedule-too-long"},
    "no-scheduler": {"no-scheduler"},
    "learning-rate-rounded": {"lr-rounded"},
    "resumed-with-the-schedule-at-its-start": {"resume-resets-schedule"},
    "resumed-with-the-schedule-ahead": {"schedule-off-by-steps"},
    "logged-norm-after-clipping": {"reported-norm"},
    "logged-norm-squared": {"reported-norm"},
    "logged-rate-after-the-step": {"lr-reported-a-step-off"},
    "logged-tokens-with-prompts": {"reported-counts"},
    "logged-rollouts-of-rank-zero": {"reported-counts"},
} | {name: {"reported-loss"} for name in ALL if half(name) == 0 and name.startswith("logged-loss-")} | {
    name: {"reported-metric"} for name in ALL if half(name) == 0 and name.startswith("logged-reward-")
}  # fmt: skip

GOOD = ("right", "unknown")
"""Right or honestly unknown."""


@dataclass(frozen=True)
class Judged:
    """One fault against one reference.

    Attributes:
        name: of the fault.
        reference: that it was compared with.
        verdict: `right` (the first cause, or the group that the record can't tell apart, is what is wrong), `unknown`
            (no cause, and the classes contain the fault's and are not all), `misleading` (another cause, or classes
            without the fault's), `useless` (every class) or `not caught`.
        diagnosis: as it was made.
    """

    name: str
    reference: str
    verdict: str
    diagnosis: Diagnosis

    @property
    def said(self) -> str:
        """The cause, or the classes, as one reads it."""
        if not self.diagnosis.causes:
            return f"unknown: {', '.join(self.diagnosis.classes)}"
        first = self.diagnosis.causes[0]
        names = " | ".join(cause.name for cause in grouped(self.diagnosis.causes)[0])
        return f"{first.likelihood:.0%} {first.fit.name}: {names}"


def judge(name: str, diagnosis: Diagnosis) -> str:
    """Return the verdict on a diagnosis of a fault."""
    kind = ALL[name].kind
    if not diagnosis.classes:
        return "not caught"
    if diagnosis.causes:
        first = grouped(diagnosis.causes)[0]
        if half(name) == 0:
            return "right" if {cause.name for cause in first} & RIGHT.get(name, set()) else "misleading"
        return "right" if kind in {cause.kind for cause in first} else "misleading"
    if kind not in diagnosis.classes:
        return "misleading"
    return "unknown" if len(diagnosis.classes) < len(CLASSES) - 1 else "useless"


def judged(names: Iterable[str], folder: Path, dtype: str) -> list[Judged]:
    """Judge the faults whose traces lie in a folder, against every reference that lies there too."""
    found = []
    for name in names:
        for path in sorted(folder.glob(f"*/{name}.jsonl")):
            candidate = read_trace(path)
            for reference in REFERENCES:
                if len(candidate.steps) and (path.parent / f"{reference}.jsonl").exists():
                    right = read_trace(path.parent / f"{reference}.jsonl")
                    diagnosis = diagnose(right, candidate, compare(right, candidate, Tier.REASSOCIATED, dtype))
                    found.append(Judged(name, reference, judge(name, diagnosis), diagnosis))
    return found


def shares(found: Iterable[Judged]) -> dict[str, float]:
    """Return of all that were caught the shares of good and of misleading ones, and of the sure ones the right."""
    caught = [one for one in found if one.verdict != "not caught"]
    sure = [one for one in caught if one.diagnosis.causes and one.diagnosis.causes[0].likelihood >= 0.8]
    counts = Counter(one.verdict for one in caught)
    return {
        "good": sum(counts[verdict] for verdict in GOOD) / max(1, len(caught)),
        "misleading": counts["misleading"] / max(1, len(caught)),
        "sure and right": sum(one.verdict == "right" for one in sure) / max(1, len(sure)),
    }


def table(found: Iterable[Judged]) -> str:
    """Return one line for each fault and reference, with the truth, and the counts."""
    rows = list(found)
    lines = [
        f"{one.verdict:10} {one.reference:6} [{ALL[one.name].kind}] {one.name}: {one.said}\n"
        f"{'':11}{ALL[one.name].truth}"
        for one in rows
    ]
    for reference in REFERENCES:
        of_it = [one for one in rows if one.reference == reference]
        counts = ", ".join(f"{verdict} {count}" for verdict, count in Counter(it.verdict for it in of_it).most_common())
        numbers = ", ".join(f"{name} {share:.1%}" for name, share in shares(of_it).items())
        lines.append(f"against {reference}: {counts}; {numbers}")
    return "\n".join(lines)


def fits(found: Iterable[Judged]) -> dict[str, tuple[int, int]]:
    """Return for each kind of fit how many faults it named rightly, of how many: `Fit` holds these numbers."""
    right: dict[str, dict[str, bool]] = {}
    for one in found:
        if one.diagnosis.causes:
            of_fit = right.setdefault(one.diagnosis.causes[0].fit.name, {})
            of_fit[one.name] = of_fit.get(one.name, True) and one.verdict == "right"
    return {name: (sum(faults.values()), len(faults)) for name, faults in right.items()}


def config(stage: int, dtype: str) -> dict[str, Any]:
    """Return the configuration that the faults run with."""
    plain: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    return plain if dtype == "fp32" else {**plain, dtype: {"enabled": True}}


def names_of(which: int, stage: int) -> list[str]:
    """Return the faults of a half that are faults on a stage, those of one scenario together."""
    names = [name for name, fault in ALL.items() if half(name) == which and stage in fault.stages]
    return sorted(names, key=lambda name: shape(ALL[name], config(stage, "fp32")).name)


def run(which: int, stage: int, dtype: str, folder: Path, parts: int = 2) -> list[Judged]:
    """Run a half in some launches, of up to five minutes each, and judge it."""
    names = names_of(which, stage)
    size = -(-len(names) // parts)
    for start in range(0, len(names), size):
        record(names[start : start + size], config(stage, dtype), folder)
    return judged(names, folder, dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recorded", action="store_true", help="judge what lies in --out, start nothing")
    options = parser.parse_args()
    if options.recorded:
        every = judged(names_of(options.half, options.stage), options.out, options.dtype)
    else:
        every = run(options.half, options.stage, options.dtype, options.out)
    print(table(every))
    print(fits(every))
