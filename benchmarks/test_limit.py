"""The share of a window's time that is the model's own work: how far from the limit a window is, by rival."""

from benchmarks.results import Section, shown
from benchmarks.setups import STAGES, ZERO, launched

TARGET, MAX_TOKENS, ROUNDS = 16, 2048, 9
LENGTHS = {2: ("GSM8K", "log-normal"), 1: ("GSM8K",)}
RIVALS = {
    "ds_parity": "ds_parity, planned",
    "packed": "the recipe, packed",
    "padded": "the recipe, padded",
    "accelerate": "accelerate's loop, padded",
    "trainer": "the Trainer under install(), padded",
}
SAID = f"""\
The time of a window's rollouts on one rank without DeepSpeed, forward and backward in full micro-batches of at most
{MAX_TOKENS:,} tokens, divided by the time of the window times its ranks. 1 would be the limit: nothing is padded,
nobody waits, nothing is reduced, no step is taken. Windows of {TARGET} rollouts, 132,000 parameters, planning and
collation included. The recipe is PipelineRL's (see below), and the Trainer that of transformers, on which TRL builds.
GSM8K's rollouts of up to 1,024 tokens, or lengths from a log-normal distribution (median 160 tokens, longest 1,024).
The ranks share 2 cores; one rank alone shares them with none."""


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_passes": TARGET,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_parity": {"lookahead": 16},
    }


def test_share_of_the_models_own_work(benchmark, tmp_path, results):
    rows = []

    def measure():
        for ranks, drawn in LENGTHS.items():
            calls = {
                (lengths, stage): {
                    **{"config": config(stage), "rounds": ROUNDS},
                    **{"max_tokens": MAX_TOKENS, "lengths": lengths},
                }
                for lengths in drawn
                for stage in STAGES
            }
            found = launched(tmp_path / f"{ranks} ranks", "benchmarks.limit:measure", calls, ranks)
            for lengths in drawn:
                for rival, said in RIVALS.items():
                    shares = [_shares(found[lengths, stage], rival) for stage in STAGES]
                    name = f"{lengths}, {ranks} rank{'s' if ranks > 1 else ''}, {said}"
                    rows.append((name, *map(shown, shares)))

    benchmark.pedantic(measure, rounds=1)
    results(Section("limit", "Share of a window's time that is the model's own work", SAID, ("", *ZERO), rows))


def _shares(measured, rival):
    seconds, ranks = measured["seconds"], measured["ranks"]
    return [alone / (taken * ranks) for alone, taken in zip(seconds["alone"], seconds[rival], strict=True)]
