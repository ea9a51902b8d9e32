"""A pipeline: trained layers have no gradient where what comes to them needs none, and activations are checkpointed.

    deepspeed --num_accelerators 2 tools/deepspeed_faults/checkpointed_over_ids.py

What a reentrant function returns needs a gradient where one of its inputs does, and never for the sake of the weights
that it uses (runtime/activation_checkpointing/checkpointing.py, CheckpointFunction). PipelineModule checkpoints by that
function unless it is told otherwise, and DeepSpeed lets the first stage's inputs need a gradient, but whole numbers can
not (runtime/pipe/engine.py, _exec_load_micro_batch). So the first layers behind ids of tokens stay untrained in silence
where a later layer of their stage is not checkpointed, such as a head that is a function. Where all are, torch raises
on that stage, and the others wait.
"""

import sys
from functools import partial

import deepspeed
import torch
from _places import exit_code, tell
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec


def scores(words: torch.nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    """Return the score of each word: the head is the embedding."""
    return x @ words.weight.t()


def untrained(stage: int) -> float:
    """Take a step without momentum, and return how many of the two layers between have not moved."""
    words = partial(TiedLayerSpec, "words", torch.nn.Embedding, 8, 4)
    layers = [words(), *(LayerSpec(torch.nn.Linear, 4, 4) for _ in range(2)), words(forward_fn=scores)]
    model = PipelineModule(
        layers, num_stages=1, loss_fn=lambda out, _: out.pow(2).mean(), activation_checkpoint_interval=1
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    weights = [one for name, one in engine.module.named_parameters() if name.endswith("weight") and "tied" not in name]
    before = [one.detach().clone() for one in weights]
    ids = torch.arange(3, device=engine.device)[None]
    engine.train_batch(iter([(ids, ids)]))
    return float(sum(bool((one == other).all()) for one, other in zip(weights, before, strict=True)))


def main() -> dict[str, str]:
    """Take the step on ZeRO 0 and 1."""
    deepspeed.init_distributed()
    return tell(
        {f"ZeRO {stage}": partial(untrained, stage) for stage in (0, 1)},
        said=lambda found: f"{found:g} of two trained layers have not moved; 0 is right",
        right=lambda found: found == 0,
        fault=lambda found: found == 2,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main()))
