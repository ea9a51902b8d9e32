"""Comparing two traces of 100,000 steps, beside Python's json reading their lines, the least that one must do."""

import json
import random
import time

from benchmarks.results import Section, shown
from ds_parity.parity.comparison.bounds import Tier
from ds_parity.parity.comparison.compare import compare
from ds_parity.trace import Header, StepRecord, Weights
from ds_parity.trace.columns import TraceFile

STEPS = 100_000
HEADER = Header(scenario="s", seed=1, versions={}, device="cpu", ranks=2, config_hash="ab", engine="ds_parity")


def written(path, noise):
    """A trace with weights of which every figure is moved by up to a part of it."""
    rng = random.Random(0)

    def moved(value):
        return value * (1 + noise * rng.uniform(-1, 1))

    with path.open("w") as file:
        file.write(HEADER.model_dump_json() + "\n")
        for step in range(1, STEPS + 1):
            counts = {"passes": 9, "idle_passes": 2, "rollouts": 12, "prompts": 3, "tokens": 2491, "total": 2491.0}
            sketch = tuple(moved(10.0 + place) for place in range(16))
            weights = Weights(checksum=f"{rng.getrandbits(256):064x}", norm=moved(44.0), sketch=sketch)
            figures = {"loss": moved(0.7), "lr": (1e-3,), "grad_norm": moved(1.4), "weights": weights}
            file.write(StepRecord(step=step, **counts, **figures).model_dump_json() + "\n")
    return TraceFile.open(path)


def read_by_json(*traces):
    for trace in traces:
        with trace.path.open("rb") as file:
            for line in file:
                json.loads(line)


def test_compare_100_000_steps(benchmark, tmp_path, results):
    """Equal within their bounds, and read piece by piece."""
    files = written(tmp_path / "a", 0.0), written(tmp_path / "b", 1e-8)

    def measure():
        return [_seconds(lambda: _compared(files)) / _seconds(lambda: read_by_json(*files)) for _ in range(5)]

    rows = [("`json.loads` of both files' lines", shown(benchmark.pedantic(measure, rounds=1)))]
    said = f"Two traces of {STEPS:,} steps, in turn with what is the least that one must do."
    results(Section("traces", "Time of `ds-parity compare`", said, ("rival", "compare / rival"), rows))


def _compared(files):
    measured = compare(*files, Tier.REASSOCIATED)
    assert measured.equal
    assert measured.steps == STEPS


def _seconds(action):
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
