"""`deepspeed.initialize` replaced by `ds_parity.initialize`, with or without keys of ds_parity.

Where `gradient_accumulation_passes` is set, it is set to what the configuration means for bare DeepSpeed. Where the
caller's boundary is set, so are losses that are divided already and a mean over ranks: what a step of bare DeepSpeed is
after several backwards.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def replace_initialize(deepspeed: ModuleType, mode: str) -> None:
    """Put `ds_parity.initialize` in the place of `deepspeed.initialize`.

    Args:
        deepspeed: the imported package.
        mode: `plain` (without keys), `keyed` (with the passes) or `caller` (with the caller's boundary).
    """
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **keywords: Any) -> Any:
        import ds_parity

        deepspeed.initialize = original  # type: ignore[attr-defined]  # ds_parity.initialize calls it
        try:
            with_keys = mode != "plain" and not args
            return ds_parity.initialize(*args, **(keyed(keywords, mode) if with_keys else keywords))
        finally:
            deepspeed.initialize = initialize  # type: ignore[attr-defined]

    deepspeed.initialize = initialize  # type: ignore[attr-defined]


CALLER = {"boundary": "caller", "loss_weight": "divided", "across_ranks": "mean"}


def keyed(keywords: dict[str, Any], mode: str = "keyed") -> dict[str, Any]:
    """Return the keywords of `initialize` with the keys of a mode in the configuration, where they can be computed."""
    import torch.distributed as dist
    from deepspeed import init_distributed
    from deepspeed.accelerator import get_accelerator

    from ds_parity.config import load_config
    from ds_parity.engine import initialize as module

    given = {name: keywords.get(name) for name in ("args", "config", "config_params")}
    source = module.source_of(given)
    if source is None or (given["config"] is not None and module.source_of({"args": given["args"]}) is not None):
        return keywords  # DeepSpeed refuses these, and so must ds_parity
    config = load_config(source)
    if not dist.is_initialized():
        init_distributed(dist_backend=get_accelerator().communication_backend_name())
    ranks = module.data_parallel_size(keywords.get("mpu"), keywords.get("mesh_param"), config)
    passes = uniform_passes(config, ranks)
    # DeepSpeed divides losses by accumulation steps of its own, where there are any; a caller's boundary has none.
    if passes is None or (mode == "caller" and passes != ranks):
        return keywords
    keys = {"ds_parity": CALLER} if mode == "caller" else {"gradient_accumulation_passes": passes}
    if mode == "caller" and "train_micro_batch_size_per_gpu" not in config:
        keys["train_micro_batch_size_per_gpu"] = config["train_batch_size"] // ranks
    rest = {name: value for name, value in keywords.items() if name not in given}
    return {
        **rest,
        "args": module._without_config(given["args"]),
        "config": {**config, **keys},
    }


def uniform_passes(config: Mapping[str, Any], ranks: int) -> int | None:
    """Return the micro-batches of a step of bare DeepSpeed, summed over ranks; None where it refuses the batch sizes.

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
