"""Measure the constants of the REASSOCIATED bound: how far sound runs lie from the torch reference.

    python tools/measure_bounds.py --seeds 3 --ranks 2

Runs every configuration of ds_configs/ with our engine and with the reference on real rollouts, and prints the greatest
relative difference per type and quantity in units of eps * sqrt(rollouts), beside the constant that is in force
(ds_parity/parity/bounds.py). A constant is about four times what is measured.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from ds_parity.config import load_config
from ds_parity.parity.bounds import EPS, C, Tier
from ds_parity.parity.compare import Comparison, compare
from ds_parity.parity.launch import Job, run
from ds_parity.parity.scenario import Scenario
from ds_parity.parity.verify import calls
from ds_parity.trace import read_trace

CONFIGS = Path(__file__).parent.parent / "ds_configs"
QUANTITIES = ("loss", "grad_norm", "weights")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("ds_parity_out/bounds"))
    given = parser.parse_args()
    scenarios = [
        Scenario(f"{path.stem}-{seed}", load_config(path), given.ranks, "overshoot", given.windows, seed, short=2)
        for path in sorted(CONFIGS.glob("*.json"))
        for seed in range(given.seeds)
    ]
    folder = given.out.resolve()
    job = Job(calls([(scenario, ("torch",)) for scenario in scenarios], folder), folder / "ranks", given.ranks, 3600)
    run(job, lambda done, title: print(f"\r{done} of {len(job.calls)}: {title:60}", end="", flush=True))
    print_table(scenarios, folder)


def print_table(scenarios: list[Scenario], folder: Path) -> None:
    """Print the greatest differences over all scenarios."""
    greatest: dict[tuple[str, str], float] = defaultdict(float)
    for scenario in scenarios:
        traces = [read_trace(folder / scenario.name / f"{engine}.jsonl") for engine in ("torch", "ds_parity")]
        comparison = compare(traces[0], traces[1], Tier.REASSOCIATED, scenario.dtype)
        for quantity, value in measured(comparison).items():
            greatest[scenario.dtype, quantity] = max(greatest[scenario.dtype, quantity], value)
    print(f"\n{'type':6}{'quantity':12}{'measured':>10}{'in force':>10}")
    for (dtype, quantity), value in sorted(greatest.items()):
        print(f"{dtype:6}{quantity:12}{value:10.3f}{C[dtype][quantity]:10.3f}")


def measured(comparison: Comparison) -> dict[str, float]:
    """Return the greatest difference per quantity, in units of eps * sqrt(rollouts so far)."""
    rollouts, found = 0, dict.fromkeys(QUANTITIES, 0.0)
    for row in comparison.rows:
        rollouts += row.candidate.rollouts if row.candidate else 0
        for quantity in QUANTITIES:
            difference = getattr(row, quantity)
            if difference is not None:
                found[quantity] = max(found[quantity], difference / EPS[comparison.dtype] / max(rollouts, 1) ** 0.5)
    return found


if __name__ == "__main__":
    main()
