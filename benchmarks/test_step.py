"""The wrapper against the bare engine driven by hand: the same passes, two ranks, ratios inside one run."""

import statistics
from pathlib import Path

import pytest

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.scenario import Scenario

HERE = str(Path(__file__).parent)
STAGES = (0, 1, 2, 3)


def scenario(stage, shape="uniform", max_tokens=None, model="ds_parity.parity.model:build", **section):
    """One window of 16 real rollouts."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": section,
    }
    sized = {"max_tokens": max_tokens, "model": model}
    return Scenario(f"step-{stage}", config, shape=shape, windows=1, seed=1, **sized).to_json()


def launched(folder, function, scenarios, **arguments):
    calls = [
        Call(f"{function} {stage}", f"ranked:{function}", {"scenario": one, **arguments})
        for stage, one in zip(STAGES, scenarios, strict=True)
    ]
    return dict(zip(STAGES, run(Job(tuple(calls), folder, 2, 540, (HERE,))), strict=True))


# Counts that come pass by pass keep ranks in lock-step, so that they wait for the longest rollout of every pass, which
# no wrapper can undo: there, rollouts are cut to one length. With counts known ahead they have their full length.
@pytest.mark.parametrize(
    ("max_tokens", "model", "lookahead", "rounds"),
    [
        (192, "ds_parity.parity.model:build", 0, 60),
        (192, "ranked:build_wide", 0, 12),
        (None, "ds_parity.parity.model:build", 8, 20),
    ],
    ids=["counts pass by pass", "counts pass by pass, passes ten times as long", "counts ahead"],
)
def test_step_time(benchmark, request, tmp_path, capsys, max_tokens, model, lookahead, rounds):
    """Median ratio of a window's time, ours / by hand, beside the quartiles of the ratios of single rounds."""
    scenarios = [scenario(stage, max_tokens=max_tokens, model=model, lookahead=lookahead) for stage in STAGES]
    arguments = (tmp_path / "ranks", "step_time", scenarios)
    taken = benchmark.pedantic(launched, arguments, {"rounds": rounds}, rounds=1)
    with capsys.disabled():
        print(f"\n{request.node.callspec.id}: seconds a window by hand, ours / by hand, quartiles of single rounds")
        for stage, times in taken.items():
            ratios = [a / b for a, b in zip(times["ours"], times["by hand"], strict=True)]
            median = statistics.median(times["ours"]) / statistics.median(times["by hand"])
            low, _, high = statistics.quantiles(ratios, n=4)
            benchmark.extra_info[f"zero{stage}"] = median
            print(f"ZeRO {stage} {statistics.median(times['by hand']):8.3f} {median:8.3f}   {low:.3f} .. {high:.3f}")


def test_peak_memory(benchmark, tmp_path, capsys):
    """Peak bytes of one corrected window above its start, beside what a copy of the gradients would cost."""
    scenarios = [scenario(stage, shape="overshoot", loss_weight="token") for stage in STAGES]
    peaks = benchmark.pedantic(launched, (tmp_path / "ranks", "memory", scenarios), rounds=1)
    with capsys.disabled():
        print("\nZeRO  ours [bytes]  by hand [bytes]  difference / gradients")
        for stage, found in peaks.items():
            more = (found["ours"] - found["by hand"]) / found["gradients"]
            benchmark.extra_info[f"zero{stage}"] = more
            print(f"{stage:4d}  {found['ours']:12d}  {found['by hand']:15d}  {more:+.5f}")
            assert found["corrected"]
            assert more < 0.05, "a copy of the gradients would be 1.0 (0.5 where two ranks share them)"
