"""Fast-LLM's `docs_per_step` (read in 5afa8c70, branch jlp_rl_features), in our words, over the bare DeepSpeed engine.

    deepspeed --num_accelerators 2 tools/migrations/fast_llm/before.py --log fast_llm.jsonl
    deepspeed --num_accelerators 2 tools/migrations/fast_llm/before.py --loss labels --probe

Cited: fast_llm/engine/training/trainer.py:159-178 (micro-batches are fetched until all ranks together have the
documents of a step; the total is set on each), fast_llm/data/document/token.py:37-47 and language_model.py:40-51 (what
is summed over ranks, once for each fetch), fast_llm/layers/language_model/loss/policy_gradient.py:134 and 297 (what a
loss is divided by). Fast-LLM has an engine of its own; its rule is what is shown here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import Found, Watch, arguments, launched, plain_of, say
from tools.migrations.fast_llm.task import TARGET, UNITS, built, mean, stream, units, write_log

CONFIG = Path(__file__).with_name("ds_config.json")
Fetched = tuple[MicroBatch, int]
"""A micro-batch, and the labels of its pass on all ranks."""


def fetched(micro_batches: Iterator[MicroBatch]) -> Iterator[tuple[list[Fetched], int]]:
    """Yield the micro-batches of each step, and its documents on all ranks. What fills no step is in none."""
    buffer, documents = list[Fetched](), 0
    for batch in micro_batches:
        counts = torch.tensor([batch.rollouts, batch.tokens])
        dist.all_reduce(counts)
        documents += int(counts[0])
        buffer.append((batch, int(counts[1])))
        if documents >= TARGET:
            yield buffer, documents
            buffer, documents = [], 0


def train(config: Found, loss: str, trace: Path | None = None, probe: bool = False, log: Path | None = None) -> Watch:
    """Train; returns what was seen of the engine."""
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    model, twin = built(loss), built(loss, "mean")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    of = "rollouts" if UNITS[loss] == "rollout" else "tokens"
    watch = Watch(engine, of, mean if probe else None, twin, trace, config)
    logged = []
    for step, documents in fetched(stream()):
        shares = torch.zeros(1)
        for number, (batch, labels) in enumerate(step, start=1):
            # The documents of the step are set on all of its micro-batches; their labels stay those of one fetch.
            total = documents if loss == "documents" else labels
            summed = engine(**batch.inputs)
            engine.set_gradient_accumulation_boundary(number == len(step))
            engine.backward(summed / total * dist.get_world_size())
            watch.ran(batch, summed / units(batch, loss))
            shares += summed.detach() / total
        engine.step()
        watch.stepped()
        dist.all_reduce(shares)
        logged.append(float(shares))
    if log is not None and dist.get_rank() == 0:
        write_log(log, watch.steps, logged)
    return watch


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    loss = ("documents", "what it is divided by: documents or labels")
    given = arguments(__doc__, argv, CONFIG, loss=loss, log=("", "file for W&B's rows"))
    deepspeed.init_distributed()
    log = Path(given.log) if given.log else None
    say("before", train(given.config, given.loss, given.trace, given.probe, log).close())


if __name__ == "__main__":
    sys.exit(launched(main))
