"""How far sound runs lie apart: random clean scenarios against the torch reference, in units of eps * sqrt(rollouts).

From this come the constants of the REASSOCIATED bound (bounds.py), and the proof that it raises no false alarm.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_parity.parity.comparison.bounds import EPS, C
from ds_parity.parity.comparison.fields import Comparison
from ds_parity.parity.running.launch import Job, run_job
from ds_parity.parity.running.one_at_a_time import alone_in
from ds_parity.parity.running.scenario import Scenario
from ds_parity.parity.verification.verify import Progress, calls, outcome

QUANTITIES = ("loss", "grad_norm", "weights")
_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    {"type": "SGD", "params": {"lr": 0.01}},
    {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
)


@dataclass(frozen=True)
class Calibration:
    """What the scenarios came to.

    Attributes:
        comparisons: of every scenario, by name.
        accelerator: what they ran on.
    """

    comparisons: dict[str, Comparison]
    accelerator: str

    @property
    def alarms(self) -> list[str]:
        """Names of the scenarios that are said to differ: none, where the bounds are right."""
        return [name for name, comparison in self.comparisons.items() if not comparison.equal]

    def table(self) -> list[tuple[str, str, float, float, int]]:
        """Return for each type and quantity: the greatest difference in units, the constant in force, the scenarios."""
        greatest: dict[tuple[str, str], float] = defaultdict(float)
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for comparison in self.comparisons.values():
            for quantity, value in measured(comparison).items():
                key = comparison.dtype, quantity
                greatest[key] = max(greatest[key], value)
                counts[key] += 1
        return [(*key, value, C[key[0]][key[1]], counts[key]) for key, value in sorted(greatest.items())]


def drawn(count: int, seed: int = 0, ranks: int = 2) -> list[Scenario]:
    """Return random scenarios over everything that a step depends on; the same for the same arguments.

    Args:
        count: how many (>= 1).
        seed: of the draw.
        ranks: data-parallel ranks.
    """
    return [_drawn(random.Random(f"{seed} {number}"), f"clean-{seed}-{number:03d}", ranks) for number in range(count)]


def calibrate(
    scenarios: Sequence[Scenario],
    folder: Path,
    *,
    timeout: float = 3600.0,
    progress: Progress = lambda done, title: None,
) -> Calibration:
    """Run scenarios with the torch reference and with ds_parity, and compare.

    Args:
        scenarios: all on the same number of ranks.
        folder: for traces and the ranks' log.
        timeout: seconds for all of it.
        progress: called with the number of runs that have finished, and the title of the one under way.

    Raises:
        HarnessError: ranks died, hung, or time ran out, or another process calibrates in `folder`.
    """
    folder = folder.resolve()
    job = Job(calls([(one, ("torch",)) for one in scenarios], folder), folder / "ranks", scenarios[0].ranks, timeout)
    with alone_in(folder, "calibrate"):
        ran = run_job(job, progress)
        comparisons = {one.name: outcome(one, "torch", folder).comparison for one in scenarios}
    return Calibration(comparisons, ran[0]["accelerator"])


def measured(comparison: Comparison) -> dict[str, float]:
    """Return the greatest difference per quantity, in units of eps * sqrt(rollouts so far)."""
    rollouts, greatest = 0, dict.fromkeys(QUANTITIES, 0.0)
    for row in comparison.rows:
        rollouts += (row.candidate.rollouts or 0) if row.candidate else 0
        for quantity in QUANTITIES:
            difference = getattr(row, quantity)
            if difference is not None:
                units = difference / EPS[comparison.dtype] / max(rollouts, 1) ** 0.5
                greatest[quantity] = max(greatest[quantity], units)
    return greatest


def _drawn(rng: random.Random, name: str, ranks: int) -> Scenario:
    shape = rng.choice(("uniform", "ragged", "overshoot", "rising", "falling", "planned", "hollow"))
    drive = "loop" if shape == "uniform" else rng.choice(("loop", "passes"))
    target = ranks * rng.randint(2, 8)
    optimizer = rng.choice(_OPTIMIZERS)
    rate = optimizer["params"]["lr"]
    warmup = {"warmup_num_steps": rng.randint(3, 12), "warmup_min_lr": rate / 2, "warmup_max_lr": rate}
    section = {
        "loss_weight": rng.choice(("rollout", "token", "pass", "target")),
        "loss_reduction": rng.choice(("mean", "sum")),
        "lr_progress": rng.choice(("optimizer_step", "rollout")),
        "lookahead": rng.choice((0, 0, 3, 8)) if drive == "passes" else 0,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "gradient_clipping": rng.choice((0.0, 0.3, 1.0)),
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": rng.randrange(4)},
        "bf16": {"enabled": rng.random() < 0.4},
        "ds_parity": section,
    }
    return Scenario(
        name,
        config,
        ranks,
        shape=shape,
        drive=drive,
        windows=rng.randint(3, 6),
        seed=rng.randrange(40),
        max_tokens=rng.choice((64, 160, 400)),
        micro_batch_tokens=rng.choice((400, 1200)),
        collation=rng.choice(("padded", "packed")),
        model="ds_parity.parity.data.model:build_tiny",
        short=rng.randrange(target) if shape == "overshoot" else 0,
    )
