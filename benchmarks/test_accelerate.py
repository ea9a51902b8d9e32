"""The wrapper beside accelerate's loop: the same micro-batches, uniform windows, which are all that accelerate has."""

import pytest

from benchmarks.results import Section, divided, shown
from benchmarks.setups import STAGES, ZERO, launched, scenario

SAID = """\
`Accelerator.accumulate` and `backward` with `DeepSpeedPlugin` and fixed `gradient_accumulation_steps`. 2 ranks, 8
passes on each, one rollout of 192 tokens a micro-batch, 132,000 parameters. Every engine ends with the same weights,
bit for bit."""


def test_window_beside_accelerate(benchmark, tmp_path, results):
    """Both engines and accelerate's loop take as many steps, and end with the same weights."""
    pytest.importorskip("accelerate", reason="accelerate, of the extra hf, is the rival")
    calls = {
        (ahead, stage): {"scenario": scenario(stage, lookahead=ahead), "rounds": 10}
        for ahead in (8, 0)
        for stage in STAGES
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:accelerate_time", calls), rounds=1)
    rows = [
        ("ds_parity, counts ahead (`lookahead: 8`) / accelerate", *_ratios(measured, 8, "ds_parity", "accelerate")),
        ("ds_parity, counts pass by pass / accelerate", *_ratios(measured, 0, "ds_parity", "accelerate")),
        ("accelerate / the engine driven by hand", *_ratios(measured, 0, "accelerate", "by hand")),
    ]
    results(Section("accelerate", "Time of a window, ds_parity / accelerate's loop", SAID, ("", *ZERO), rows))
    for one in measured.values():
        assert len(set(one["steps"])) == 1
        assert one["same weights"]


def _ratios(measured, ahead, over, under):
    for stage in STAGES:
        seconds = measured[ahead, stage]["seconds"]
        yield shown(divided(seconds[over], seconds[under]))
