"""The wrapper beside the bare engine driven by hand: the same passes, two ranks."""

from benchmarks.results import Section, divided, shown
from benchmarks.setups import SMALL, STAGES, ZERO, launched, scenario

# Counts that come pass by pass keep ranks in lock-step, so that they wait for the longest rollout of every pass, which
# no wrapper can undo: there, rollouts are cut to one length. With counts known ahead they have their full length.
SETTINGS = {
    "counts ahead (`lookahead: 8`), rollouts in full length": (SMALL, None, 8, 12),
    "counts pass by pass": (SMALL, 192, 0, 16),
    "counts pass by pass, 3.3 million parameters": ("benchmarks.ranked:build_256", 192, 0, 6),
}


def test_step_time(benchmark, tmp_path, results):
    """A window's time; both engines end with the same weights."""
    calls = {
        (setting, stage): {
            "scenario": scenario(stage, max_tokens=tokens, model=model, lookahead=ahead),
            "rounds": rounds,
        }
        for setting, (model, tokens, ahead, rounds) in SETTINGS.items()
        for stage in STAGES
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:step_time", calls), rounds=1)
    results(
        Section(
            "by-hand",
            "Time of a window, ds_parity / the engine driven by hand",
            SAID,
            ("", *ZERO),
            tuple(_rows(measured)),
        )
    )
    assert all(one["same weights"] for one in measured.values())


SAID = """\
Bare DeepSpeed with a moving boundary, its total known beforehand. 2 ranks, 8 passes on each, one rollout (of 192
tokens, where it isn't said otherwise) a micro-batch, 132,000 parameters."""


def _rows(measured):
    for setting in SETTINGS:
        seconds = [measured[setting, stage]["seconds"] for stage in STAGES]
        yield setting, *(shown(divided(taken["ds_parity"], taken["by hand"])) for taken in seconds)


def test_peak_memory(benchmark, tmp_path, results):
    """Peak bytes of one corrected window above its start."""
    calls = {
        stage: {"scenario": scenario(stage, max_tokens=None, shape="overshoot", loss_weight="token")}
        for stage in STAGES
    }
    peaks = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:memory", calls), rounds=1)
    more = {
        stage: (measured["ds_parity"] - measured["by hand"]) / measured["gradients"]
        for stage, measured in peaks.items()
    }
    rows = [
        (
            "peak, ds_parity / by hand",
            *(f"{measured['ds_parity'] / measured['by hand']:.5f}" for measured in peaks.values()),
        ),
        ("difference / gradients", *(f"{ratio:+.5f}" for ratio in more.values())),
    ]
    said = """The most memory that a window with corrected gradients takes, above its start, beside the engine driven by
hand. A copy of the gradients would be 1 (0.5 where two ranks share them). Counted once: it doesn't scatter."""
    results(Section("memory", "Peak memory of a corrected window", said, ("", *ZERO), rows))
    assert all(measured["corrected"] for measured in peaks.values())
    assert max(more.values()) < 0.05
