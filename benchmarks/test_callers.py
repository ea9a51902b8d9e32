"""Loops that end windows themselves, and windows whose total is known ahead, beside bare DeepSpeed; two ranks."""

from benchmarks.results import Section, divided, shown
from benchmarks.setups import SMALL, STAGES, ZERO, launched, scenario

OWN = "outside of DeepSpeed"
SIZES = {"132,000 parameters": (SMALL, 40), "3.3 million parameters": ("benchmarks.ranked:build_256", 20)}


def test_the_callers_step(benchmark, tmp_path, results):
    """A window's time; both engines end with the same weights."""
    calls = {
        (name, stage): {"scenario": scenario(stage, model=model, boundary="caller"), "rounds": rounds}
        for name, (model, rounds) in SIZES.items()
        for stage in (0, 1)
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:callers_time", calls), rounds=1)
    rows = [
        (f"{name}: {said}", *(shown(divided(of[rival], of["unmanaged"])) for of in _seconds(measured, name, (0, 1))))
        for name in SIZES
        for rival, said in (("ds_parity", "ds_parity / unmanaged"), ("again", "unmanaged / unmanaged"))
    ]
    rows += [(f"{name}: {OWN}", *(shown(measured[name, stage]["own"], 3) for stage in (0, 1))) for name in SIZES]
    said = """\
`ds_parity.boundary: caller` beside bare DeepSpeed with `managed_gradient_accumulation: false`, which divides by a fixed
number of backwards. 2 ranks, 8 backwards on each and then one `step()`, one rollout of 192 tokens a micro-batch.
ds_parity exchanges counts, loss and metrics once a step. The second row of each size divides the times of two engines
that are alike: so far off 1 a ratio is by chance. The last rows are the share of its windows' time that ds_parity
spends outside of DeepSpeed: its own code, and the wait for other ranks' counts, in which ranks also wait for the slower
one, as they would in DeepSpeed's next collective."""
    results(Section("callers", "Time of a window that the caller ends", said, ("", *ZERO[:2]), rows))
    assert all(one["same weights"] for one in measured.values())


def test_totals_of_whole_windows(benchmark, tmp_path, results):
    """The same for windows that are read before their first pass (`lookahead: window`), with 3.3 million parameters."""
    model, rounds = SIZES["3.3 million parameters"]
    calls = {
        ("window", stage): {"scenario": scenario(stage, model=model, lookahead="window"), "rounds": rounds}
        for stage in STAGES
    }
    measured = benchmark.pedantic(
        launched, (tmp_path / "ranks", "benchmarks.ranked:step_time_and_chance", calls), rounds=1
    )
    rows = [
        (said, *(shown(divided(of[rival], of["by hand"])) for of in _seconds(measured, "window", STAGES)))
        for rival, said in (("ds_parity", "ds_parity / by hand"), ("again", "by hand / by hand"))
    ]
    rows.append((OWN, *(shown(measured["window", stage]["own"], 3) for stage in STAGES)))
    said = """\
Windows that are read before their first pass, so that their total is known, beside the bare engine driven by hand.
2 ranks, 8 passes on each, one rollout of 192 tokens a micro-batch, 3.3 million parameters. The second row divides the
times of two engines that are alike, and the third is the share of its windows' time that ds_parity spends outside of
DeepSpeed, the wait for other ranks' counts included."""
    results(Section("whole-windows", "Time of a window with `lookahead: window`", said, ("", *ZERO), rows))
    assert all(one["same weights"] for one in measured.values())


def _seconds(measured, name, stages):
    return [measured[name, stage]["seconds"] for stage in stages]
