"""Rollouts a second of planned streams beside the recipe that RL trainers write by hand: two ranks, real GSM8K rollouts."""

import statistics
from pathlib import Path

import pytest

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.rollouts import load_rollouts

HERE = str(Path(__file__).parent)
STAGES = (0, 1, 2, 3)
MAX_TOKENS = 4096


def config(stage, target=64):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": {"lookahead": 16},
    }


@pytest.mark.parametrize("rounds", [8])
def test_rollouts_a_second_beside_the_recipe(benchmark, tmp_path, capsys, rounds):
    """Windows of 64 rollouts, micro-batches of at most 4,096 tokens; padded ones hold so many that the longest would fit."""
    held = MAX_TOKENS // max(len(rollout.tokens) for rollout in load_rollouts())
    arguments = {"rounds": rounds, "max_tokens": MAX_TOKENS, "held": held}
    calls = tuple(Call(f"ZeRO {s}", "recipe:measure", {"config": config(s), **arguments}) for s in STAGES)
    found = benchmark.pedantic(run, (Job(calls, tmp_path / "ranks", 2, 900, (HERE,)),), rounds=1)
    with capsys.disabled():
        print("\nrollouts a second, planned / recipe (quartiles of windows), and passes with idle ones among them")
        for stage, result in zip(STAGES, found, strict=True):
            show(benchmark, stage, result)


def show(benchmark, stage, result):
    seconds, passes = result["seconds"], result["passes"]
    for rival in ("packed quota", "padded quota"):
        ratios = [theirs / ours for theirs, ours in zip(seconds[rival], seconds["planned"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        benchmark.extra_info[f"zero{stage} {rival}"] = median
        ours, theirs = ("{} ({})".format(*passes[name]) for name in ("planned", rival))
        print(f"ZeRO {stage} {rival}: {median:.2f} ({low:.2f} .. {high:.2f}), passes {ours} beside {theirs}")
        assert passes["planned"][1] <= passes[rival][1]
