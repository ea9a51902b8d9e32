"""What the scripts on universal checkpoints of pipelines have in common: the engine."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule


def two_stages(layers: Sequence[LayerSpec], *, universal: bool) -> deepspeed.PipelineEngine:
    """Return an engine of two stages with equally many layers, on ZeRO 1 with torch's AdamW over what is not frozen.

    Args:
        layers: an even number of them.
        universal: whether it loads universal checkpoints.
    """
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.pow(2).mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "checkpoint": {"load_universal": universal},
    }
    trained = [one for one in model.parameters() if one.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
