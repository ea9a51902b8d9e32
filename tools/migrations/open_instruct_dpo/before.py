"""open-instruct's DPO with gradient accumulation, in our words, over the bare DeepSpeed engine.

    deepspeed --num_accelerators 2 tools/migrations/open_instruct_dpo/before.py --rule tokens --probe
    deepspeed --num_accelerators 2 tools/migrations/open_instruct_dpo/before.py --rule alike --trace alike.jsonl
    deepspeed --num_accelerators 2 tools/migrations/open_instruct_dpo/before.py --rule gas --trace gas.jsonl

- alike: each micro-batch's mean over its pairs, divided by the number of micro-batches of the batch; the accuracy
  compares the means of the rewards (what pull request #1447 was reviewed for);
- tokens: each micro-batch's mean, weighed by its tokens (e6c3044a, open_instruct/olmo_core_train_modules.py:224-286,
  what was merged);
- gas: each micro-batch's mean, divided by `gradient_accumulation_steps` (e6c3044a, open_instruct/dpo_tune_cache.py:
  565-623, which trains through accelerate on DeepSpeed).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from torch import Tensor

from ds_parity.planning.rollout import MicroBatch
from tools.migrations.common import Found, Watch, arguments, launched, plain_of, say
from tools.migrations.open_instruct_dpo.task import BATCH, MICRO, batches, built, mean

CONFIG = Path(__file__).with_name("ds_config.json")


def train(config: Found, rule: str, trace: Path | None = None, probe: bool = False) -> Watch:
    """Train; returns what was seen of the engine."""
    config = plain_of(config) | {"gradient_accumulation_steps": 1}
    model = built()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    watch = Watch(engine, "rollouts", mean if probe else None, built(), trace, config)
    for batch in batches():
        accuracy = torch.zeros(2)
        for micro_batch in batch:
            loss, margins, _ = engine(**micro_batch.inputs)
            share = share_of(micro_batch, batch, rule)
            engine.set_gradient_accumulation_boundary(micro_batch is batch[-1])
            engine.backward(loss * share)
            watch.ran(micro_batch, loss)
            weight = micro_batch.tokens if rule == "tokens" else share
            accuracy += torch.tensor([seen_as_right(margins, rule) * weight, weight])
        engine.step()
        watch.stepped()
        watch.steps[-1]["accuracy"] = logged(accuracy, rule)
    return watch


def share_of(one: MicroBatch, batch: Sequence[MicroBatch], rule: str) -> float:
    """Return the share of a micro-batch in its rank's gradient; the mean over ranks is DeepSpeed's."""
    if rule == "tokens":
        return one.tokens / sum(other.tokens for other in batch)
    return 1 / (len(batch) if rule == "alike" else -(-BATCH // MICRO))


def seen_as_right(margins: Tensor, rule: str) -> float:
    """Return the accuracy of a micro-batch: of its pairs, or of the means of their rewards."""
    return float(margins.mean() > 0) if rule == "alike" else float((margins > 0).float().mean())


def logged(accuracy: Tensor, rule: str) -> float:
    """Return the accuracy of the step that is logged; `accuracy` is this rank's (weighted sum, weight)."""
    dist.all_reduce(accuracy)
    return float(accuracy[0] / (accuracy[1] if rule == "tokens" else dist.get_world_size()))


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments and train."""
    given = arguments(__doc__, argv, CONFIG, rule=("alike", "what micro-batches weigh: alike, tokens or gas"))
    deepspeed.init_distributed()
    say("before", train(given.config, given.rule, given.trace, given.probe).close())


if __name__ == "__main__":
    sys.exit(launched(main))
