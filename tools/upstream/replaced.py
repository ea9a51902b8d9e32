"""`deepspeed.initialize` replaced by ours, with the configuration as it is or with the key set to its uniform equivalent."""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def replace_initialize(deepspeed: ModuleType, mode: str) -> None:
    """Put ours in the place of `deepspeed.initialize`.

    Args:
        deepspeed: the imported package.
        mode: `plain` (ours, without the key) or `keyed` (ours, with it).
    """
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **keywords: Any) -> Any:
        import ds_parity

        deepspeed.initialize = original  # type: ignore[attr-defined]  # ours calls it
        try:
            return ds_parity.initialize(*args, **(keyed(keywords) if mode == "keyed" and not args else keywords))
        finally:
            deepspeed.initialize = initialize  # type: ignore[attr-defined]

    deepspeed.initialize = initialize  # type: ignore[attr-defined]


def keyed(keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `initialize` with the key in the configuration, where one can be worked out."""
    import torch.distributed as dist
    from deepspeed import init_distributed
    from deepspeed.accelerator import get_accelerator

    from ds_parity.config import load_config
    from ds_parity.engine import initialize as ours

    given = {name: keywords.get(name) for name in ("args", "config", "config_params")}
    source = ours.source_of(given)
    if source is None or (given["config"] is not None and ours.source_of({"args": given["args"]}) is not None):
        return keywords  # DeepSpeed refuses these; so must ours
    config = load_config(source)
    if not dist.is_initialized():
        init_distributed(dist_backend=get_accelerator().communication_backend_name())
    ranks = ours.data_parallel_size(keywords.get("mpu"), keywords.get("mesh_param"), config)
    passes = uniform_passes(config, ranks)
    if passes is None:
        return keywords
    rest = {name: value for name, value in keywords.items() if name not in given}
    return {
        **rest,
        "args": ours._without_config(given["args"]),
        "config": {**config, "gradient_accumulation_passes": passes},
    }


def uniform_passes(config: Mapping[str, Any], ranks: int) -> int | None:
    """Micro-batches in a step of bare DeepSpeed, summed over ranks; None where it would refuse the batch sizes.

    The batch triple is filled in as DeepSpeed does (runtime/config.py, _set_batch_related_parameters).
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (config.get(name) for name in names)
    if any(not isinstance(value, int) for value in (batch, micro, steps) if value is not None):
        return None
    if steps is None:
        steps = batch // micro // ranks if batch and micro else 1
    if micro is None and batch:
        micro = batch // (steps * ranks) if steps > 0 else None
    consistent = micro and steps > 0 and (batch is None or batch == micro * steps * ranks)
    return steps * ranks if consistent else None
