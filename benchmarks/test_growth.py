"""What the wrapper adds, as windows get longer, ranks more and the model larger: ZeRO 2, beside by hand."""

import math
import statistics

from benchmarks.results import Section, divided, shown
from benchmarks.setups import launched, scenario

TINY = "ds_parity.parity.data.model:build_tiny"
AHEAD = 8
MODES = {"counts ahead (`lookahead: 8`)": AHEAD, "counts pass by pass": 0}
ROUNDS = {1: 60, 2: 50, 8: 30, 64: 10, 512: 4}
PARAMETERS = {64: 230_000, 128: 854_000, 256: 3_280_000, 512: 12_900_000}


def test_passes(benchmark, tmp_path, results):
    """What a pass costs more does not grow with the passes of a window; one exchange a pass, or one in 8."""
    calls = {
        (passes, ahead): {
            "scenario": scenario(passes=passes, max_tokens=64, model=TINY, lookahead=ahead),
            "rounds": rounds,
        }
        for ahead in MODES.values()
        for passes, rounds in ROUNDS.items()
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:step_time", calls), rounds=1)
    said = f"""2 ranks, rollouts of 64 tokens, 29,000 parameters: passes as short as they get. *Added a pass*
is the difference between ds_parity and by hand, divided by the passes, in units of a pass by hand in windows of
{max(ROUNDS)}. In windows of 1 and 2 it includes what a window costs once: the step's loss is summed over ranks, and its
record made."""
    header = (
        "passes in a window, on each rank",
        *(f"{name}, {what}" for name in MODES for what in ("ratio", "added a pass")),
    )
    rows = [(str(passes), *_grown(measured, passes)) for passes in ROUNDS]
    results(Section("passes", "Time of a window, by its passes", said, header, rows))
    _exchanged_and_equal(measured)


def _grown(measured, passes):
    for ahead in MODES.values():
        seconds = measured[passes, ahead]["seconds"]
        a_pass = statistics.median(measured[max(ROUNDS), ahead]["seconds"]["by hand"]) / max(ROUNDS)
        pairs = zip(seconds["ds_parity"], seconds["by hand"], strict=True)
        yield shown(divided(seconds["ds_parity"], seconds["by hand"]))
        yield shown([(own - by_hand) / passes / a_pass for own, by_hand in pairs])


def test_ranks(benchmark, tmp_path, results):
    """One exchange a pass, or one in 8, on any number of ranks; none on one."""
    rows, said = (
        [],
        """8 passes on each rank, rollouts of 192 tokens, 132,000 parameters. 4 ranks share 2 cores, if the
machine has no more: there the ranks' turns decide, by hand too.""",
    )

    def measure():
        for ranks in (1, 2, 4):
            calls = {
                ahead: {"scenario": scenario(ranks=ranks, lookahead=ahead), "rounds": 16} for ahead in MODES.values()
            }
            measured = launched(tmp_path / f"{ranks} ranks", "benchmarks.ranked:step_time", calls, ranks)
            rows.append((str(ranks), *(_ratio(one) for one in measured.values())))
            _exchanged_and_equal({(8, ahead): one for ahead, one in measured.items()}, exchanging=ranks > 1)

    benchmark.pedantic(measure, rounds=1)
    results(Section("ranks", "Time of a window, by ranks", said, ("ranks", *MODES), rows))


def test_model_sizes(benchmark, tmp_path, results):
    """The larger the model, the less is added."""
    calls = {
        (width, ahead): {
            "scenario": scenario(passes=4, model=f"benchmarks.ranked:build_{width}", lookahead=ahead),
            "rounds": 30,
        }
        for width in PARAMETERS
        for ahead in MODES.values()
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.ranked:step_time", calls), rounds=1)
    rows = [
        (f"{parameters:,} ({width} wide)", *(_ratio(measured[width, ahead]) for ahead in MODES.values()))
        for width, parameters in PARAMETERS.items()
    ]
    said = "2 ranks, 4 passes on each, rollouts of 192 tokens, four layers."
    results(Section("sizes", "Time of a window, by the model's size", said, ("parameters", *MODES), rows))
    assert all(one["same weights"] for one in measured.values())


def _ratio(measured):
    return shown(divided(measured["seconds"]["ds_parity"], measured["seconds"]["by hand"]))


def _exchanged_and_equal(measured, *, exchanging=True):
    for (_, ahead), one in measured.items():
        chunks = math.ceil(one["passes"] / max(1, ahead))
        # A window starts with as many passes known as one exchange holds, which are read before the last ones are run.
        assert chunks * exchanging <= one["exchanges"] <= (chunks + bool(ahead)) * exchanging
        assert one["same weights"]
