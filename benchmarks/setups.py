"""What the benchmarks start on ranks."""

from pathlib import Path

from ds_parity.parity.running.launch import Call, Job, run_job
from ds_parity.parity.running.scenario import Scenario

ROOT = Path(__file__).parents[1]
# Ranks import `benchmarks` from the first, and what is a script's from the others.
IMPORTS = (str(ROOT), str(ROOT / "tools"), str(ROOT / "tools" / "from_pipelinerl"))
SMALL = "ds_parity.parity.data.model:build"
STAGES = (0, 1, 2, 3)
ZERO = tuple(f"ZeRO {stage}" for stage in STAGES)


def scenario(stage=2, *, passes=8, ranks=2, shape="uniform", max_tokens=192, model=SMALL, **section):
    """One window of real rollouts: `passes` on each rank, of one rollout each where it is uniform."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": passes * ranks,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": section,
    }
    sized = {"max_tokens": max_tokens, "model": model, "ranks": ranks}
    return Scenario(f"step-{stage}", config, shape=shape, windows=1, seed=1, **sized).to_json()


def launched(folder, function, calls, ranks=2):
    """Run the function with each of the arguments in one launched set of ranks; returns results under the same keys."""
    made = tuple(Call(str(key), function, arguments) for key, arguments in calls.items())
    return dict(zip(calls, run_job(Job(made, folder, ranks, 540, IMPORTS)), strict=True))
