"""Rollouts a second of planned streams beside the recipe that RL trainers write by hand: two ranks, real GSM8K rollouts."""

import statistics
from pathlib import Path

import pytest

from ds_parity.parity.launch import Call, Job, run
from ds_parity.parity.rollouts import load_rollouts

HERE = Path(__file__).parent
IMPORTS = (str(HERE), str(HERE.parent / "tools" / "from_pipelinerl"))
STAGES = (0, 1, 2, 3)


def config(stage, target):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": {"lookahead": 16},
    }


@pytest.mark.parametrize(("max_tokens", "target", "rounds"), [(4096, 64, 8), (16384, 128, 5)])
def test_rollouts_a_second_beside_the_recipe(benchmark, tmp_path, capsys, max_tokens, target, rounds):
    """Micro-batches of at most so many tokens; padded ones hold as many rollouts as fit if all were the longest."""
    held = max_tokens // max(len(rollout.tokens) for rollout in load_rollouts())
    arguments = {"rounds": rounds, "max_tokens": max_tokens, "held": held}
    calls = tuple(Call(f"ZeRO {s}", "recipe:measure", {"config": config(s, target), **arguments}) for s in STAGES)
    found = benchmark.pedantic(run, (Job(calls, tmp_path / "ranks", 2, 900, IMPORTS),), rounds=1)
    with capsys.disabled():
        print(f"\n{max_tokens:,} tokens a micro-batch, {target} rollouts a window, padded micro-batches of {held}")
        print("rollouts a second, planned / recipe (quartiles of windows), and passes with idle ones among them")
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
