"""The wrapper against the bare engine driven by hand: the same passes, two ranks, ratios inside one run."""

import statistics
from pathlib import Path

import pytest

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.scenario import Scenario

HERE = str(Path(__file__).parent)
STAGES = (0, 1, 2, 3)


def scenario(stage, ahead):
    """One window of 16 real rollouts on the bundled model, one a pass and rank.

    In full length with look-ahead. Without, cut to one length: a window whose end is not known beforehand keeps ranks in
    lock-step, pass by pass, so that they wait for the longest rollout of every pass, which no wrapper can undo.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": {"lookahead": 8 if ahead else 0},
    }
    length = None if ahead else 192
    return Scenario(f"step-{stage}", config, shape="uniform", windows=1, seed=1, max_tokens=length).to_json()


def launched(folder, function, ahead, timeout=540, **arguments):
    calls = tuple(
        Call(f"{function} on ZeRO {stage}", f"ranked:{function}", {"scenario": scenario(stage, ahead), **arguments})
        for stage in STAGES
    )
    return dict(zip(STAGES, run(Job(calls, folder, 2, timeout, (HERE,))), strict=True))


@pytest.mark.parametrize("ahead", [False, True], ids=["counts pass by pass", "counts ahead"])
def test_step_time(benchmark, tmp_path, capsys, ahead):
    """Median ratio of a window's time, ours / by hand, beside the quartiles of the ratios of single rounds."""
    arguments = (tmp_path / "ranks", "step_time", ahead)
    taken = benchmark.pedantic(launched, arguments, {"rounds": 20 if ahead else 60}, rounds=1)
    with capsys.disabled():
        print(
            f"\ncounts {'ahead' if ahead else 'pass by pass'}\nZeRO  ours / by hand (median of medians)   quartiles of single rounds"
        )
        for stage, times in taken.items():
            ratios = [a / b for a, b in zip(times["ours"], times["by hand"], strict=True)]
            median = statistics.median(times["ours"]) / statistics.median(times["by hand"])
            low, _, high = statistics.quantiles(ratios, n=4)
            benchmark.extra_info[f"zero{stage}"] = median
            print(f"{stage:4d}  {median:37.3f}   {low:.3f} .. {high:.3f}")


def test_peak_memory(benchmark, tmp_path, capsys):
    """Peak bytes of one corrected window above its start, beside what a copy of the gradients would cost."""
    peaks = benchmark.pedantic(launched, (tmp_path / "ranks", "memory", False), rounds=1)
    with capsys.disabled():
        print("\nZeRO  ours [bytes]  by hand [bytes]  difference / gradients")
        for stage, found in peaks.items():
            more = (found["ours"] - found["by hand"]) / found["gradients"]
            benchmark.extra_info[f"zero{stage}"] = more
            print(f"{stage:4d}  {found['ours']:12d}  {found['by hand']:15d}  {more:+.5f}")
            assert more < 0.05, "a copy of the gradients would be 1.0 (0.5 where two ranks share them)"


@pytest.mark.parametrize("torch_too", [False, True])
def test_rewrite(benchmark, torch_too):
    """Rewriting a configuration, in milliseconds; the rival is DeepSpeed reading one."""
    from ds_parity.config import load_config, rewrite

    path = str(Path(HERE).parent / "ds_configs" / "zero2_bf16.json")
    if torch_too:
        from deepspeed.runtime.config import DeepSpeedConfig

        plain = rewrite(load_config(path), 1).config
        benchmark(lambda: DeepSpeedConfig(plain))
    else:
        benchmark(lambda: rewrite(load_config(path), 1))
