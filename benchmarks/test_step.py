"""The wrapper against the bare engine driven by hand: the same passes, two ranks, ratios inside one run."""

import statistics
from pathlib import Path

import pytest

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.scenario import Scenario

HERE = str(Path(__file__).parent)
STAGES = (0, 1, 2, 3)


def scenario(stage, dtype="fp32", shape="ragged"):
    """One window of real rollouts in full length on the bundled model; tokens weigh, so it is corrected."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": 16,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
        "ds_parity": {"loss_weight": "token"},
    }
    return Scenario(f"step-{stage}-{dtype}", config, shape="uniform", windows=1, seed=1).to_json()


def launched(folder, function, timeout=540, **arguments):
    calls = tuple(
        Call(f"{function} on ZeRO {stage}", f"ranked:{function}", {"scenario": scenario(stage), **arguments})
        for stage in STAGES
    )
    return dict(zip(STAGES, run(Job(calls, folder, 2, timeout, (HERE,))), strict=True))


def test_step_time(benchmark, tmp_path, capsys):
    """Median ratio of a window's time, ours / by hand, beside the quartiles of the ratios of single rounds."""
    taken = benchmark.pedantic(launched, (tmp_path / "ranks", "step_time"), {"rounds": 40}, rounds=1)
    with capsys.disabled():
        print("\nZeRO  ours / by hand (median of medians)   quartiles of single rounds")
        for stage, times in taken.items():
            ratios = [a / b for a, b in zip(times["ours"], times["by hand"], strict=True)]
            median = statistics.median(times["ours"]) / statistics.median(times["by hand"])
            low, _, high = statistics.quantiles(ratios, n=4)
            benchmark.extra_info[f"zero{stage}"] = median
            print(f"{stage:4d}  {median:37.3f}   {low:.3f} .. {high:.3f}")


def test_peak_memory(benchmark, tmp_path, capsys):
    """Peak bytes of one corrected window above its start, beside what a copy of the gradients would cost."""
    peaks = benchmark.pedantic(launched, (tmp_path / "ranks", "memory"), rounds=1)
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
