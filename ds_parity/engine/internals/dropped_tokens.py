"""DeepSpeed's MoE layer beside ranks that divide a model or a sequence: it takes their tokens for the same."""

from __future__ import annotations

import weakref

import deepspeed
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from ds_parity.engine.internals.surface import Engine
from ds_parity.errors import ConfigError


def refuse_dropped_tokens(engine: Engine) -> None:
    """Raise ConfigError where each rank's layer would compute a part of its tokens, and have the rest from others.

    So it does where `deepspeed.utils.groups.mpu` has ranks for tensor parallelism, be they of this engine or of one
    that was built later (moe/sharded_moe.py, MOELayer.forward, and moe/mappings.py, 0.19.8). With sequence parallelism
    their tokens are others. gloo raises in the forward, because of a shape that NCCL takes.

    Args:
        engine: the bare engine.
    """
    if not engine.has_moe_layers:
        return
    ranks = bwc_tensor_model_parallel_world_size(deepspeed.utils.groups.mpu)
    # AutoEP has layers of its own.
    if ranks > 1 and any(isinstance(one, MOELayer) for one in engine.module.modules()):
        raise ConfigError(
            f"an engine with DeepSpeed's MoE layer, while the mpu of deepspeed.utils.groups has {ranks} ranks for one "
            "model or one sequence (of this engine, or of another one of this process): the layer takes their tokens "
            "for the same, computes a part of them on each, and nobody has measured it; use no mpu, no AutoTP and no "
            "sequence parallelism in a process with such a layer, or set deepspeed.utils.groups.mpu to None while "
            "this engine runs"
        )


def watch_forwards(engine: Engine) -> None:
    """Look before each forward of an engine that only runs forward, and is DeepSpeed's own.

    Args:
        engine: the bare engine, which the model may outlive.
    """
    if not engine.has_moe_layers:
        return
    watched = weakref.ref(engine)

    def before(*_: object) -> None:
        if (there := watched()) is not None:
            refuse_dropped_tokens(there)

    engine.module.register_forward_pre_hook(before)
