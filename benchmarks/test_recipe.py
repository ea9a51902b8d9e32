"""Rollouts a second of planned streams beside the recipe that RL trainers write by hand: 2 ranks, GSM8K rollouts."""

from benchmarks.results import Section, divided, shown
from benchmarks.setups import STAGES, ZERO, launched
from ds_parity.parity.data.rollouts import load_rollouts

SIZES = {16384: (128, 3), 4096: (64, 5)}  # windows of so many rollouts, so many rounds
SAID = """Real steps, planning and collation included, beside PipelineRL's loop written anew: one quota per rank,
micro-batches filled as rollouts come, dummies, one `all_gather` and `.item()` a pass. 2 ranks, full GSM8K rollouts,
windows of 128 (16,384 tokens) and 64 rollouts; passes of both in all rounds."""


def config(stage, target):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": target,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": {"lookahead": 16},
    }


def test_rollouts_a_second_beside_the_recipe(benchmark, tmp_path, results):
    """Micro-batches of at most so many tokens; padded ones hold as many rollouts as fit if all were the longest."""
    longest = max(len(rollout.tokens) for rollout in load_rollouts())
    calls = {
        (tokens, stage): {
            **{"config": config(stage, target), "rounds": rounds},
            **{"max_tokens": tokens, "rows": tokens // longest},
        }
        for tokens, (target, rounds) in SIZES.items()
        for stage in STAGES
    }
    measured = benchmark.pedantic(launched, (tmp_path / "ranks", "benchmarks.recipe:measure", calls), rounds=1)
    rows = [
        (f"{tokens:,} tokens a micro-batch, {rival}", *(_shown(measured[tokens, stage], rival) for stage in STAGES))
        for tokens in SIZES
        for rival in ("padded quota", "packed quota")
    ]
    results(Section("recipe", "Rollouts a second, planned / PipelineRL's recipe", SAID, ("", *ZERO), rows))
    for one in measured.values():
        for rival in ("padded quota", "packed quota"):
            assert one["passes"]["planned"][1] <= one["passes"][rival][1]


def _shown(measured, rival):
    seconds, passes = measured["seconds"], measured["passes"]
    return (
        f"{shown(divided(seconds[rival], seconds['planned']))}, {passes['planned'][0]} beside {passes[rival][0]} passes"
    )
